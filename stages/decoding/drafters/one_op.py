"""A whole drafting cycle of an EAGLE head as one CPU op: what `growing` does pass by pass.

Between the passes stands little work on many small things, which finds the caches emptied by the pass before.
In Python, with a call for every step, it takes as long as the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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
_NONE = torch.empty(0, dtype=torch.float64)


@dataclass(frozen=True)
class Draft:
    """What was asked for one sequence.

    length: stable rows; waiting: verified tokens to be run.
    """

    slot: int
    params: SamplingParams
    root: int
    length: int
    waiting: Sequence[int]
    plan: TreePlan


@dataclass(frozen=True)
class Grown:
    """The candidates of one tree, to learn from; see `draft` in draft.h.

    candidates int64 [C, 5], chances float64 [C, 2]: of all trees of the cycle, this one's from ``begin`` to
        ``end``.
    pools: ids, log-probabilities and noise [R, P] of all nodes whose children were ranked.
    row: the root's among those.
    """

    candidates: Tensor
    chances: Tensor
    begin: int
    end: int
    pools: tuple[Tensor, Tensor, Tensor]
    row: int

    def learn(
        self, ranking: Ranking, calibrations: Calibrations, temperature: float, truth: Sequence[int]
    ) -> None:
        """Compare the tree with what the target has drawn; see `Ranking.learn`."""
        torch.ops.eagle_cpu.learn(
            calibrations.at(temperature).numbers,
            ranking.strength.numbers(temperature) if temperature > 0 else _NONE,
            self.candidates,
            self.chances,
            *self.pools,
            self.begin,
            self.end,
            self.row,
            truth,
            GRID,
            FACTORS,
            PRIOR,
            FADING,
        )


def draft(
    head: CpuHead,
    cache: SlotCache,
    drafts: Sequence[Draft],
    states: Tensor,
    ranking: Ranking,
    calibrations: Calibrations,
    lag: int,
) -> tuple[list[DraftTree], list[Grown], list[int], Tensor]:
    """Run what waits, and grow a tree for each sequence.

    Args:
        cache: the head's, with room for the rows.
        states: [W, w], the target's, of all tokens that wait.
        lag: see `GrowingDrafter`.

    Returns:
        The trees, what can be learned of each, the rows of every pass, and the head's states [B, h] behind
        the last stable rows.
    """
    numbers: list[int] = []
    settings: list[float] = []
    strengths: list[float] = []
    hot = any(draft.params.temperature > 0 for draft in drafts)
    for one in drafts:
        params, plan = one.params, one.plan
        kind = _PRICED if plan.prices is not None else _KINDS.get(plan.kind, _DYNAMIC)
        numbers += (one.slot, one.length, len(one.waiting), signed(params.seed), params.sample)
        numbers += (kind, plan.depth, plan.width, plan.nodes)
        settings += (params.temperature, plan.min_prob, plan.expand_prob)
        if hot:
            strengths += ranking.strength.by_depth(params.temperature)
    prices = next((draft.plan.prices for draft in drafts if draft.plan.prices is not None), _NO_PRICES)
    paths = max((draft.plan.paths for draft in drafts), key=len)  # the others' are beginnings of it
    found, candidates, chances, roots, *pools = torch.ops.eagle_cpu.draft(
        head.op,
        cache.where,
        *head.turns(cache.rows),
        states,
        [token for draft in drafts for token in draft.waiting],
        [calibrations.at(draft.params.temperature).numbers for draft in drafts],
        numbers,
        settings,
        strengths,
        prices.nodes,
        prices.rows,
        _flat(paths) if paths else (),
        lag,
        POOL,
    )
    told = found.tolist()
    at = told[0] + 1
    passes, begin = told[1:at], 0
    trees: list[DraftTree] = []
    grown: list[Grown] = []
    for row, one in enumerate(drafts):
        count, nodes = told[at : at + 2]
        tokens, parents, depths = (told[at + 2 + i * nodes : at + 2 + (i + 1) * nodes] for i in range(3))
        at += 2 + 3 * nodes
        trees.append(DraftTree((one.root, *tokens), (-1, *parents), (0, *depths)))
        grown.append(Grown(candidates, chances, begin, begin + count, tuple(pools), row))
        begin += count
    return trees, grown, passes, roots


@lru_cache(maxsize=16)
def _flat(paths: tuple[Path, ...]) -> tuple[int, ...]:
    """Of every node of a static tree its parent among them, -1 the root, and its rank there."""
    places = {path: i for i, path in enumerate(paths)} | {(): -1}
    return tuple(number for path in paths for number in (places[path[:-1]], path[-1]))
