"""What the drafter that serves proposes all along a row, and the logits it proposes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.decoding.drafters import Drafter, EagleDrafter, drafter_of, make_drafter
from stages.decoding.drafters.ranking import Node, Ranking
from stages.decoding.sampling import SamplingParams
from stages.decoding.tree import TreeConfig
from stages.features.layout import FeatureRow
from stages.heads import DraftHead
from stages.targets import Target


@dataclass(frozen=True)
class Drafts:
    """Greedy chains of S tokens behind each of the s supervised positions of a row.

    Attributes:
        tokens: int64 [s, S], target ids.
        logits: fp32 [s, S, K], of the probe ids.
    """

    tokens: Tensor
    logits: Tensor

    def lengths(self, row: FeatureRow) -> Tensor:
        """uint8 [s]: how many tokens of each chain, from its start, are the row's own."""
        return (self.tokens == own_tokens(row, self.tokens.shape[1])).long().cumprod(1).sum(1).to(torch.uint8)


def draft_along(
    target: Target, head: DraftHead, states: Tensor, row: FeatureRow, steps: int, probes: Tensor
) -> Drafts:
    """Drafts from every supervised position of a row, each time from the row's own tokens and states.

    Args:
        head: on a device, in the dtype to draft in.
        states: [n, w], what the head draws on at each of the row's tokens: the target's states at its
            feature layers, one after the other, or its last.
        probes: int64 [K] draft ids.
    """
    device = head.draft_ids.device
    states = states.to(device, next(head.parameters()).dtype)
    ids, tokens, logits = row.input_ids.tolist(), list[Tensor](), list[Tensor]()
    served, watched = (make_drafter(drafter_of(head), target, head) for _ in range(2))
    if isinstance(watched, EagleDrafter):
        watched.one_op = False  # nothing is seen inside an op
    for drafter in (served, watched):
        drafter.start(0, ids, SamplingParams())
    plan = TreeConfig.parse(f"chain:depth={steps}").plan(steps)
    known = 0  # pairs (state i, token i+1) that the drafters have
    with _watched(watched, probes.to(device)) as seen:
        for position in row.supervised.tolist():
            for drafter in (served, watched):
                drafter.extend([0], states[known:position], [ids[known + 1 : position + 1]])
            known = position
            seen.clear()
            watched.propose([0], [plan])
            (tree,) = served.propose([0], [plan])
            tokens.append(torch.tensor(tree.tokens[1:]))
            logits.append(torch.cat(seen)[:steps])
    return Drafts(torch.stack(tokens), torch.stack(logits))


@contextmanager
def _watched(drafter: Drafter, probes: Tensor) -> Iterator[list[Tensor]]:
    """The logits of the probe ids as the drafter ranks by them: [1, K] a step, of Medusa [S, K] at once."""
    seen: list[Tensor] = []
    (ranking,) = (value for value in vars(drafter).values() if isinstance(value, Ranking))
    children = ranking.children

    def watched(nodes: Sequence[Node], logits: Tensor, width: int) -> Any:
        seen.append(logits[:, probes].float().cpu())
        return children(nodes, logits, width)

    ranking.children = watched  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del ranking.children


def own_tokens(row: FeatureRow, steps: int) -> Tensor:
    """int64 [s, S]: the row's tokens x_{p+1} .. x_{p+S} behind each supervised position p, -1 after its turn.

    A turn ends with the token behind its last supervised position.
    """
    positions, ids = row.supervised, row.input_ids.long()
    at = positions[:, None] + torch.arange(steps)  # [s, S]
    inside = torch.isin(at, positions).long().cumprod(1).bool()
    return ids[(at + 1).clamp(max=len(ids) - 1)].where(inside, -1)
