"""Sequences decoded on the device, cycle after cycle: plainly, or with the next one under way.

The two loops are beside each other in `DeviceLoop`:

    normal      launch a cycle, wait for what it has found
    overlapped  launch a cycle, and take what the one before it has found meanwhile

While a cycle runs the host decides what ends, gives away slots, and passes tokens on. An end is seen one
cycle late; what that cycle has done for a sequence that had ended, or left, is dropped. Both put out the
same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.decoding.device.cycle import Cycle, Found
from stages.decoding.device.drafts import Drafts, NoDrafts, OracleDrafts
from stages.decoding.device.gears import Gears
from stages.decoding.device.graphs import PaddedCycle
from stages.decoding.device.head_drafts import HeadDrafts
from stages.decoding.device.letter import Letter, Moment
from stages.decoding.device.state import MOST_ENDS, DeviceState, Entry
from stages.decoding.drafters import Drafter, EagleDrafter, OracleDrafter
from stages.decoding.sampling import SamplingParams
from stages.decoding.tree import TreeConfig
from stages.targets import SlotForward, Target


@dataclass
class _Stay:
    """One sequence in its slot; root and length as the host knows them."""

    slot: int
    root: int
    length: int
    drafts: bool
    filters: bool


@dataclass(frozen=True)
class _Flight:
    """A cycle that was launched, for whom, and how: its padded size and its shape."""

    stays: tuple[_Stay, ...]
    size: int
    shape: int
    letter: Letter


class DeviceLoop:
    """All sequences that join are decoded, one cycle a step."""

    def __init__(
        self,
        target: Target,
        forward: SlotForward,
        drafts: Sequence[Drafts],
        *,
        overlap: bool,
        fused: bool = False,
        debug: bool = False,
    ) -> None:
        """Args:
        forward: over a cache with one spare slot.
        drafts: the same drafter in one shape or several, of which the fastest is used.
        overlap: which of the two loops.
        fused: see ``Cycle``.
        debug: compare what every cycle has started from with what the host knows, and poison the rows of
            those who leave.
        """
        cache = forward.cache
        self.overlap, self._debug = overlap, debug
        self._on_gpu = cache.data.is_cuda
        self._cache, self._drafts = cache, drafts
        self._state = DeviceState(cache.slots, cache.data.device)
        pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        cycles = [Cycle(target, forward, self._state, each, fused=fused) for each in drafts]
        self._runs = [PaddedCycle(cycle, cache.slots, pool) for cycle in cycles]
        self._gears = Gears(len(cycles))
        self._stays: dict[int, _Stay] = {}
        self._flying: _Flight | None = None

    def takes(self, params: SamplingParams, end_ids: frozenset[int], *, drafts: bool) -> bool:
        """Whether a request needs nothing that only the host can do."""
        can_draft = not isinstance(self._drafts[0], NoDrafts)
        by_path = params.adjusts or params.logprobs is not None
        return (can_draft or not drafts) and not by_path and len(end_ids) <= MOST_ENDS

    def join(self, slot: int, prompt_ids: Sequence[int], entry: Entry) -> None:
        """A sequence whose prompt was read takes part from the next step on."""
        most = entry.length + 1 + entry.left
        for drafts in self._drafts:
            self._cache.reserve(most + drafts.nodes)
            drafts.reserve(most)
        if entry.drafts:
            self._drafts[0].enter(slot, prompt_ids)
        self._state.put(slot, entry)
        self._stays[slot] = _Stay(slot, entry.root, entry.length, entry.drafts, entry.params.draw_key.filters)

    def leave(self, slot: int) -> None:
        """A sequence has ended, or nobody wants the rest; what a cycle under way finds for it is dropped."""
        stay = self._stays.pop(slot)
        if stay.drafts:
            self._drafts[0].leave(slot, stay.length)
        if self._debug:
            self._state.poison(slot)

    def step(self) -> list[tuple[int, Found]]:
        """One cycle: what was found, by slot."""
        return self._overlapped() if self.overlap else self._normal()

    def _normal(self) -> list[tuple[int, Found]]:
        return self._taken(self._launched())

    def _overlapped(self) -> list[tuple[int, Found]]:
        flying, self._flying = self._flying, self._launched()
        return self._taken(flying)

    def _launched(self) -> _Flight | None:
        """A cycle of all sequences, queued behind those before it."""
        stays = tuple(self._stays.values())
        if not stays:
            return None
        size = self._runs[0].size(len(stays))
        shape = self._gears.choose(size) if any(stay.drafts for stay in stays) else 0
        slots, filtered = [stay.slot for stay in stays], any(stay.filters for stay in stays)
        self._runs[shape].prepare(size, filtered=filtered)
        begun = Moment(on_gpu=self._on_gpu)
        record = self._runs[shape](slots, filtered=filtered)
        return _Flight(stays, size, shape, Letter(record, begun))

    def _taken(self, flight: _Flight | None) -> list[tuple[int, Found]]:
        """What a cycle has found, of those that are still here."""
        if flight is None:
            return []
        taken: list[tuple[int, Found]] = []
        for stay, row in zip(flight.stays, flight.letter.read(), strict=False):  # the rest is padding
            if self._stays.get(stay.slot) is not stay:
                continue
            found = Found.of(row)
            if self._debug and (found.root, found.length) != (stay.root, stay.length):
                raise RuntimeError(
                    f"slot {stay.slot}: a cycle has started from token {found.root} at {found.length}, where "
                    f"{stay.root} at {stay.length} was due"
                )
            if found.tokens:
                stay.root, stay.length = found.tokens[-1], found.length + len(found.tokens)
                taken.append((stay.slot, found))
        if drafting := [len(found.tokens) for slot, found in taken if self._stays[slot].drafts]:
            mean = sum(drafting) / len(drafting)
            self._gears.observe(flight.size, flight.shape, mean, flight.letter.seconds)
        return taken


def drafts_for(
    drafter: Drafter | None, tree: TreeConfig, *, slots: int, target: Target
) -> tuple[Drafts, ...]:
    """The drafter's counterpart on the device, in one shape or several; `NoDrafts` where it or the tree has
    none."""
    if isinstance(drafter, EagleDrafter) and (shapes := _shapes(tree)):
        first = HeadDrafts(drafter, shapes[0])
        return first, *(first.of_shape(shape) for shape in shapes[1:])
    if isinstance(drafter, OracleDrafter) and tree.kind == "chain":
        references, right, vocab = drafter.references, drafter.right, target.vocab_size
        return (OracleDrafts(references, right, vocab, slots=slots, depth=tree.depth, device=target.device),)
    return (NoDrafts(),)


def _shapes(tree: TreeConfig) -> tuple[TreeConfig, ...]:
    """What is tried for a tree; nothing for kinds that grow on the host alone."""
    if tree.kind in ("chain", "dynamic"):
        return (tree,)
    if tree.kind != "cost":
        return ()
    bounds = [(depth, 1, depth) for depth in (2, 4)] + [(5, 4, 15)]  # depth, width, nodes
    shapes = [TreeConfig.parse("none")]
    for depth, width, nodes in bounds:
        nodes, width = min(nodes, tree.nodes), min(width, tree.width)
        depth = min(depth, tree.depth, nodes)
        shapes.append(TreeConfig("dynamic", depth, width, nodes, min_prob=0.0, expand_prob=0.0))
    return tuple(dict.fromkeys(shapes))
