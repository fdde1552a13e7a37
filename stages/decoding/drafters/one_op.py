"""A whole drafting cycle of an EAGLE head as one CPU op: what `growing` does pass by pass.

Between the passes stands little work on many small things, which finds the caches emptied by the pass before.
In Python, with a call for every step, it takes as long as the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stages.decoding.drafters.calibration import Calibrations
from stages.decoding.drafters.ranking import Ranking
from stages.decoding.drafters.strength import FACTORS, FADING, GRID, POOL, PRIOR
from stages.decoding.sampling import SamplingParams, signed
from stages.decoding.tree import DraftTree, Path, Prices, TreePlan
from stages.heads.cpu_head import CpuHead
from stages.targets import SlotCache

_KINDS = {"static": 0, "best": 2}
_DYNAMIC, _PRICED = 1, 3
"""Dynamic are chains too; the numbers are those of `TreeKind` in growth.h."""

_NO_PRICES = Prices((0.0,), (0.0,))


class Grown(NamedTuple):
    """The candidates of one tree, to learn from; see `draft` in draft.h.

    candidates: float64 [C, 7], of all trees of the cycle, this one's from ``begin`` to ``end``.
    pools: ids, log-probabilities and noise [R, P] of all nodes whose children were ranked, where something
        was drawn; row: the root's.
    """

    candidates: Tensor
    pools: list[Tensor]
    begin: int
    end: int
    row: int

    def learn(
        self, ranking: Ranking, calibrations: Calibrations, temperature: float, truth: Sequence[int]
    ) -> None:
        """Compare the tree with what the target has drawn; see `Ranking.learn`."""
        torch.ops.eagle_cpu.learn(
            calibrations.at(temperature).numbers,
            ranking.strength.numbers(temperature) if temperature > 0 else None,
            self.candidates,
            self.pools,
            self.begin,
            self.end,
            self.row,
            truth,
            GRID,
            FACTORS,
            PRIOR,
            FADING,
        )


class Waiting(Protocol):
    """What a drafter knows of a sequence; see `growing.Followed`."""

    params: SamplingParams
    root: int
    length: int
    waiting: list[int]


def draft(
    head: CpuHead,
    cache: SlotCache,
    slots: Sequence[int],
    sequences: Sequence[Waiting],
    plans: Sequence[TreePlan],
    states: Tensor,
    ranking: Ranking,
    calibrations: Calibrations,
    lag: int,
) -> tuple[list[DraftTree], list[Grown], list[int], Tensor, list[Tensor]]:
    """Run what waits, and grow a tree for each sequence.

    Args:
        cache: the head's, with room for the rows.
        states: [W, w], the target's, of all tokens that wait.
        lag: see `GrowingDrafter`.

    Returns:
        The trees, what can be learned of each, the rows of every pass, the head's states [B, h] behind the
        last stable rows, and tokens, positions and places of the target's forward over the trees.
    """
    numbers: list[int] = []
    settings: list[float] = []
    strengths: list[float] = []
    tokens: list[int] = []
    learned: list[Tensor] = []
    prices = _NO_PRICES
    paths: tuple[Path, ...] = ()
    hot = any(sequence.params.temperature > 0 for sequence in sequences)
    for slot, sequence, plan in zip(slots, sequences, plans, strict=True):
        params, waiting = sequence.params, sequence.waiting
        if plan.prices is not None:
            kind, prices = _PRICED, plan.prices
        else:
            kind = _KINDS.get(plan.kind, _DYNAMIC)
        numbers += (slot, sequence.length, len(waiting), signed(params.seed), params.sample)
        numbers += (kind, plan.depth, plan.width, plan.nodes)
        settings += (params.temperature, plan.min_prob, plan.expand_prob)
        tokens += waiting
        learned.append(calibrations.at(params.temperature).numbers)
        if hot:
            strengths += ranking.strength.by_depth(params.temperature)
        if len(plan.paths) > len(paths):
            paths = plan.paths  # the others' are beginnings of the longest
    told, candidates, roots, pools, rows = torch.ops.eagle_cpu.draft(
        head.op,
        cache.where,
        *head.turns(cache.rows),
        states,
        tokens,
        learned,
        numbers,
        settings,
        strengths,
        prices.nodes,
        prices.rows,
        _flat(paths) if paths else (),
        lag,
        POOL,
    )
    at = told[0] + 1
    passes, begin = told[1:at], 0
    trees: list[DraftTree] = []
    grown: list[Grown] = []
    for row, sequence in enumerate(sequences):
        end, nodes = begin + told[at], told[at + 1]
        first, second, third = at + 2 + nodes, at + 2 + 2 * nodes, at + 2 + 3 * nodes
        trees.append(
            DraftTree(
                (sequence.root, *told[at + 2 : first]), (-1, *told[first:second]), (0, *told[second:third])
            )
        )
        grown.append(Grown(candidates, pools, begin, end, row))
        begin, at = end, third
    return trees, grown, passes, roots, rows


@lru_cache(maxsize=16)
def _flat(paths: tuple[Path, ...]) -> tuple[int, ...]:
    """Of every node of a static tree its parent among them, -1 the root, and its rank there."""
    places = {path: i for i, path in enumerate(paths)} | {(): -1}
    return tuple(number for path in paths for number in (places[path[:-1]], path[-1]))
