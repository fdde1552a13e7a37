"""The decode loop over many sequences: draft, verify, keep what the target agrees with.

Sequences join and leave between steps. A step first runs a piece of the prompts that wait to be read, so that
a long one does not hold up the others, and then one cycle of all running sequences:

    trees  = drafter.propose()            what may follow each sequence's last token; none is plain decoding
    states = target(all trees' nodes)     one forward, each node seeing its sequence and its ancestors
    drawn  = the target's own token at every node, then one walk down each tree
    keep, drafter.extend                  accepted rows become the prefix, their true states feed the head

Plain decoding is the same loop with trees of one node. What a sequence puts out is a function of its prompt
and parameters alone. On a CPU with its ops the nodes of all trees are rows of one forward, without padding;
elsewhere trees are padded to one size. On a GPU sequences that need nothing of the host in a cycle are handed
to the device's loop (`stages.decoding.device`) once their prompts are read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import MAX_NODES
from stages.decoding.costs import Costs
from stages.decoding.device import DeviceLoop, Entry, drafts_for
from stages.decoding.drafters import Drafter
from stages.decoding.logprobs import TokenLogprobs
from stages.decoding.measure import measure_costs
from stages.decoding.planner import Cycle, Planner
from stages.decoding.prefix import WarmSlots
from stages.decoding.row_tensors import PlacedRows, take_rows
from stages.decoding.running import Emission, FinishReason, GenerationRequest, Running
from stages.decoding.sampling import TokenHistory
from stages.decoding.target_pass import TargetPass, tell
from stages.decoding.tree import DraftTree, TreeConfig, TreePlan
from stages.decoding.walk import until_end, walk
from stages.errors import EagleError
from stages.targets import SlotCache, SlotForward, Target, TargetStates
from stages.targets.slots import ROWS

__all__ = ["Emission", "Engine", "FinishReason", "GenerationRequest"]

PREFILL_ROWS = 512
"""Prompt tokens that a step reads at most."""


class Engine:
    """Decodes up to ``slots`` sequences together, plainly or with a drafter. Not safe for several threads."""

    def __init__(
        self,
        target: Target,
        *,
        slots: int = 1,
        layers: tuple[int, int, int] | None = None,
        drafter: Drafter | None = None,
        planner: Planner | None = None,
        prefix_reuse: bool = False,
        overlap: bool | None = None,
    ) -> None:
        """Args:
        layers: feature layers, for a drafter that wants features.
        planner: says what to draft; goes with a drafter.
        prefix_reuse: whether a prompt that begins as an earlier sequence did reads only the rest.
        overlap: whether a cycle is launched before what the last one found is read, which on a GPU is the
            default. On a CPU, where nothing is gained by it, it takes the GPU's way through the cycle.
        """
        self.target = target
        self.drafter, self.planner = drafter, planner
        on_device = target.device.type == "cuda" or bool(overlap)
        self.cache = SlotCache.for_model(
            target.config, slots=slots, rows=1, dtype=target.dtype, device=target.device, spare=int(on_device)
        )
        self._forward = SlotForward(target, self.cache, layers=layers)
        self._pass = TargetPass(self._forward, target.device)
        self.device: DeviceLoop | None = None
        if on_device:
            tree = TreeConfig.parse("none") if planner is None else planner.tree
            drafts = drafts_for(drafter, tree, slots=slots, target=target)
            self.device = DeviceLoop(target, self._forward, drafts, overlap=overlap is not False)
        self._waiting: deque[Running] = deque()
        self._reading: list[Running] = []
        self._running: list[Running] = []
        self._warm = WarmSlots() if prefix_reuse else None
        self._extended_s = 0.0  # what the last cycle spent on its drafts after they had been verified

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values that one more token takes in every slot, the drafter's included."""
        draft = self.drafter.cache if self.drafter is not None else None
        return self.cache.row_bytes + (draft.row_bytes if draft is not None else 0)

    def fitting_tokens(self, memory: int) -> int:
        """Tokens that every slot has room for within so many bytes of keys and values."""
        return max(0, memory // self.token_bytes // ROWS * ROWS - MAX_NODES)

    def needed_bytes(self, tokens: int) -> int:
        """Bytes of keys and values where every slot has room for so many tokens."""
        return -(-(tokens + MAX_NODES) // ROWS) * ROWS * self.token_bytes

    def reserve(self, tokens: int) -> None:
        """Make every slot long enough for a sequence of so many tokens and the largest tree, once for all."""
        for cache in (self.cache, self.drafter.cache if self.drafter is not None else None):
            if cache is not None:
                cache.reserve(tokens + MAX_NODES)

    def measure_costs(self) -> Costs:
        """Of this target and drafter on this machine; nothing may be running."""
        if self._warm is not None:
            self._warm.forget(0)
        return measure_costs(self.target, self._forward, self._drafting())

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._waiting or self._reading or self._running)

    @property
    def room(self) -> int:
        """Slots that nothing waits for."""
        return max(0, self.cache.slots - len(self._running) - len(self._reading) - len(self._waiting))

    def submit(self, request: GenerationRequest, *, drafts: bool = True) -> None:
        """Queue a request; without ``drafts`` it is decoded plainly.

        Raises:
            EagleError: the prompt is empty, has ids that the target lacks, or leaves no room for a token in
                the target's context.
        """
        size = len(request.prompt_ids)
        if not 0 < size < self.target.max_length:
            raise EagleError(
                f"the prompt {request.id} has {size} tokens; the target takes 1 to "
                f"{self.target.max_length - 1}"
            )
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self.target.vocab_size:
            raise EagleError(
                f"the prompt {request.id} has ids outside the target's 0 to {self.target.vocab_size - 1}"
            )
        params = request.params
        cap = min(params.max_new_tokens, self.target.max_length - size)
        ends = params.end_ids(self.target.eos_ids)
        history = TokenHistory(request.prompt_ids) if params.adjusts else None
        drafting = drafts and self.drafter is not None
        self._waiting.append(Running(request, cap, ends, drafting, history=history))

    def cancel(self, request_id: str) -> None:
        """Drop a request, whatever state it is in; an unknown one is ignored."""
        self._waiting = deque(s for s in self._waiting if s.request.id != request_id)
        for sequence in [s for s in self._reading if s.request.id == request_id]:
            self._reading.remove(sequence)
            self._leave(sequence)
        for sequence in [s for s in self._running if s.request.id == request_id]:
            self._release(sequence)

    @torch.inference_mode()
    def step(self) -> list[Emission]:
        """Read a piece of the waiting prompts and give every running sequence its next tokens."""
        try:
            self._admit()
            emissions = self._read() if self._reading else []
            if here := [s for s in self._running if not s.on_device]:
                emissions += self._cycle(here)
            if len(self._running) > len(here):
                emissions += self._device_cycle()
            return emissions
        except BaseException:
            self._distrust()
            raise

    def _admit(self) -> None:
        taken = {s.slot for s in (*self._running, *self._reading)}
        free = [slot for slot in range(self.cache.slots) if slot not in taken]
        while self._waiting and free:
            sequence = self._waiting.popleft()
            self._take_slot(sequence, free)
            free.remove(sequence.slot)
            self._reading.append(sequence)

    def _take_slot(self, sequence: Running, free: Sequence[int]) -> None:
        """Give a sequence a slot, and what is known of its prompt."""
        prompt, source = sequence.request.prompt_ids, None
        sequence.slot = free[0]
        if self._warm is not None:
            busy = {s.slot: s.held for s in (*self._running, *self._reading)}
            place = self._warm.take(free, busy, prompt, sequence.drafts)
            sequence.slot, source, sequence.pairs = place.slot, place.source, place.pairs
            sequence.read = sequence.stats.reused = place.known
            if source != place.slot:
                self.cache.copy(source, place.slot, place.known)
        if sequence.drafts:
            self._drafting().start(sequence.slot, prompt, sequence.params, sequence.read, source)
            if self.planner is not None:
                self.planner.start(sequence.slot)

    def _leave(self, sequence: Running) -> None:
        """Keep what a sequence leaves in its slot."""
        if self._warm is not None and sequence.sound:
            self._warm.leave(sequence.slot, sequence.held)

    def _distrust(self) -> None:
        """A step has failed half-way: nothing is kept of what the slots hold."""
        for sequence in (*self._running, *self._reading):
            sequence.sound = False
        if self._warm is not None:
            self._warm.clear()

    # ---- prompts ----

    def _read(self) -> list[Emission]:
        """Run the next tokens of the prompts that are being read, the first come first."""
        began = time.perf_counter()
        pieces: list[tuple[Running, int]] = []
        budget = PREFILL_ROWS
        for sequence in self._reading:
            size = min(budget, len(sequence.request.prompt_ids) - sequence.read)
            if size:
                pieces.append((sequence, size))
            budget -= size
            if not self._forward.takes_rows:
                break  # one at a time: a padded batch would be as long as the longest
        states = self._pass.read(pieces, tap=self._taps([s for s, _ in pieces]))
        begin, done, rows = 0, [], []
        for sequence, size in pieces:
            begin += size
            sequence.read += size
            if sequence.read == len(sequence.request.prompt_ids):
                done.append(sequence)
                rows.append(begin - 1)
        told: list[list[TokenLogprobs] | None] = []
        first: dict[int, int] = {}
        if done:
            logits, drawn = self._pass.draw(states.last[rows], done)
            first = dict(zip(map(id, done), drawn, strict=True))
            told = [None] * len(done)
            if logits is not None:
                told = tell(logits, done, [([b], [token]) for b, token in enumerate(drawn)])
        begin = 0
        for sequence, size in pieces:
            prompt, at = sequence.request.prompt_ids, sequence.read - size
            following = prompt[at + 1 : sequence.read + 1]
            if id(sequence) in first:
                following.append(first[id(sequence)])
            if sequence.drafts:
                self._extend([(sequence, begin, range(size), following)], states)
            begin += size
        spent = time.perf_counter() - began
        for sequence, _ in pieces:
            sequence.stats.prefill_s += spent
        emissions = []
        for sequence, logprobs in zip(done, told, strict=True):
            self._reading.remove(sequence)
            self._running.append(sequence)
            emissions.append(self._emit(sequence, [first[id(sequence)]], logprobs))
            if sequence.finish_reason is None:
                self._board(sequence)
        self._release_finished(done)
        return emissions

    # ---- cycles on the device ----

    def _board(self, sequence: Running) -> None:
        """Let the device go on with a sequence, if it needs nothing of the host."""
        if self.device is None:
            return
        if self.device.takes(sequence.params, sequence.end_ids, drafts=sequence.drafts):
            left = sequence.cap - len(sequence.output)
            root, ends = sequence.output[-1], sequence.end_ids
            entry = Entry(root, sequence.stored, left, ends, sequence.params, sequence.drafts)
            self.device.join(sequence.slot, sequence.request.prompt_ids, entry)
            sequence.on_device = True

    def _device_cycle(self) -> list[Emission]:
        assert self.device is not None
        began = time.perf_counter()
        running = {s.slot: s for s in self._running if s.on_device}
        emissions = []
        for slot, found in self.device.step():
            sequence = running[slot]
            sequence.stats.add(found.drafted, found.levels, len(found.tokens), found.accepted)
            emissions.append(self._emit(sequence, found.tokens, None, found.accepted))
        self._release_finished(list(running.values()))
        spent = time.perf_counter() - began
        for sequence in running.values():
            sequence.stats.decode_s += spent
        return emissions

    # ---- cycles of the host ----

    def _cycle(self, running: Sequence[Running]) -> list[Emission]:
        began = time.perf_counter()
        trees, rows = self._propose(running)
        drafted = time.perf_counter()
        states, logits, drawn = self._pass.verify(running, trees, tap=self._taps(running), rows=rows)
        walks, begin = [], 0
        for sequence, tree in zip(running, trees, strict=True):
            path, bonus = walk(tree, drawn[begin : begin + len(tree.tokens)])
            tokens = until_end([tree.tokens[n] for n in path[1:]] + [bonus], sequence.end_ids)
            walks.append((begin, path, tokens[: sequence.cap - len(sequence.output)]))
            begin += len(tree.tokens)
        told: list[list[TokenLogprobs] | None] = [None] * len(running)
        if logits is not None:
            told = tell(
                logits, running, [([begin + n for n in path], tokens) for begin, path, tokens in walks]
            )
        verified = time.perf_counter()
        for sequence, tree, (_, path, tokens) in zip(running, trees, walks, strict=True):
            sequence.stats.count(tree, len(tokens), min(len(path) - 1, len(tokens)))
        self._observe(running, trees, walks, drafted - began + self._extended_s, verified - drafted)
        emissions, kept = [], []
        for sequence, (begin, path, tokens), logprobs in zip(running, walks, told, strict=True):
            stored = sequence.stored
            emission = self._emit(sequence, tokens, logprobs, min(len(path) - 1, len(tokens)))
            emissions.append(emission)
            if emission.finish_reason is None or self._warm is not None:
                kept.append((sequence, stored, begin, path[: len(tokens)], tokens))
        emitted = time.perf_counter()
        self._pass.keep([(s.slot, stored, path) for s, stored, _, path, _ in kept])
        self._extend([(s, begin, path, tokens) for s, _, begin, path, tokens in kept if s.drafts], states)
        for sequence, emission in zip(running, emissions, strict=True):
            if emission.finish_reason is not None:
                self._release(sequence)
        now = time.perf_counter()
        self._extended_s = now - emitted
        for sequence in running:
            stats = sequence.stats
            stats.draft_s += (drafted - began) + (now - verified)
            stats.verify_s += verified - drafted
            stats.decode_s += now - began
        return emissions

    def _propose(self, running: Sequence[Running]) -> tuple[list[DraftTree], PlacedRows | None]:
        """A tree for each sequence, and their rows, if the drafter has made those of all."""
        drafting = [s for s in running if s.drafts]
        proposed: list[DraftTree] = []
        if drafting:
            assert self.planner is not None
            slots = [s.slot for s in drafting]
            beside = len(running) - len(drafting)
            plans: list[TreePlan] = self.planner.plan(slots, [s.left for s in drafting], beside)
            proposed = self._drafting().propose(slots, plans)
            if not beside:
                return proposed, self._drafting().rows
        trees = iter(proposed)
        return [next(trees) if s.drafts else DraftTree.root_only(s.output[-1]) for s in running], None

    def _observe(
        self,
        running: Sequence[Running],
        trees: Sequence[DraftTree],
        walks: Sequence[tuple[int, list[int], list[int]]],
        draft_s: float,
        verify_s: float,
    ) -> None:
        """Tell the planner what its plan came to."""
        drafting = [i for i, s in enumerate(running) if s.drafts]
        if self.planner is None or not drafting:
            return
        cycle = Cycle(
            [running[i].slot for i in drafting],
            [trees[i] for i in drafting],
            [min(len(walks[i][1]) - 1, len(walks[i][2])) for i in drafting],
            draft_s,
            verify_s,
            tuple(self._drafting().passes),  # which a prompt that is read next adds to
            len(running) - len(drafting),
        )
        self.planner.observe(cycle)

    def _extend(
        self, kept: Sequence[tuple[Running, int, Sequence[int], list[int]]], states: TargetStates
    ) -> None:
        """Give the drafter what was verified: of each sequence its first row, its nodes from there, and the
        tokens behind them."""
        if not kept:
            return
        wanted = self._wanted(states)
        rows = [begin + node for _, begin, path, _ in kept for node in path]
        chosen = None if wanted is None else take_rows(wanted, rows)
        self._drafting().extend([s.slot for s, _, _, _ in kept], chosen, [tokens for _, _, _, tokens in kept])
        for sequence, _, _, tokens in kept:
            sequence.pairs += len(tokens)

    def _emit(
        self,
        sequence: Running,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        accepted: int = 0,
    ) -> Emission:
        sequence.output += tokens
        if sequence.history is not None:
            sequence.history.extend(tokens)
        reason = sequence.finish_reason
        return Emission(sequence.request.id, tokens, reason, sequence.stats, logprobs, accepted)

    def _release_finished(self, sequences: Sequence[Running]) -> None:
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self._release(sequence)

    def _release(self, sequence: Running) -> None:
        """Take a sequence out."""
        self._running.remove(sequence)
        if sequence.on_device:
            assert self.device is not None
            self.device.leave(sequence.slot)
            if sequence.drafts:
                sequence.pairs = sequence.stored
        self._leave(sequence)

    def _wanted(self, states: TargetStates) -> Tensor | None:
        """What the drafter wants of the target at each row, [M, w]."""
        kind = self._drafting().state
        if kind == "none":
            return None
        chosen = states.features if kind == "aux" else states.last
        assert chosen is not None, "the engine was made without feature layers"
        return chosen

    def _taps(self, sequences: Sequence[Running]) -> bool:
        """Whether the drafter wants features of one of them."""
        return any(s.drafts for s in sequences) and self._drafting().state == "aux"

    def _drafting(self) -> Drafter:
        assert self.drafter is not None
        return self.drafter
