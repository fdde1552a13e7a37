"""What a head's drafts would be worth when decoding, measured on held-out rows without decoding.

The verifier draws the target's own token y at each node and accepts the child that equals y. So a drafted
token d is accepted with probability

    temperature 0   1 if d is the target's most likely token, else 0
    temperature 1   p(d), p the target's distribution over its whole vocabulary

(not with sum_v min(p_v, q_v), which is what a verifier gets that draws its drafts from q: here called
`overlap`). The draft states along each answer are those of drafting it, so a walk over the answer replays
decoding with a chain of S drafts, one candidate a step: a cycle accepts drafts up to its first miss, and the
next one begins behind the token that the target puts in its place. So cycles begin at hard positions more
often than at others, which is why agreement alone promises more than decoding gives. A walk over a tree is
the same, with several children at each node: at temperature 0 it is accepted if any of them is the target's
token, at 1 with the sum of their p.

Where an answer is what is decoded the walk is exact: greedy answers at temperature 0. At temperature 1 a
walk goes on along the answer whatever it draws, so it is an estimate, as is temperature 0 along sampled
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.heads import DraftHead
from stages.train.batch import TttBatch
from stages.train.loss import TargetLogits
from stages.train.unroll import unroll

TREE = (3, 2, 1)
"""Children of a node at each depth of the tree that is replayed; deeper ones have one."""

LOGITS_AT_ONCE = 1 << 24
LOGITS_AT_ONCE_CPU = 1 << 20


@dataclass(frozen=True)
class Walk:
    """Cycles of replayed decoding, and how many accepted draft 1, 2, .. S."""

    cycles: float
    accepted: tuple[float, ...]  # [S]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """[S], share of the cycles in which each draft was accepted."""
        return tuple(count / max(self.cycles, 1e-9) for count in self.accepted)

    @property
    def accepted_per_step(self) -> float:
        """Drafts accepted per verification."""
        return sum(self.acceptance)

    @property
    def tokens_per_step(self) -> float:
        """With the token that the target adds."""
        return 1 + self.accepted_per_step

    @classmethod
    def along(cls, chances: Tensor, turns: Sequence[int]) -> Walk:
        """Walks over each turn.

        Args:
            chances: [S, Q], probability that draft i of a cycle that begins at query q is accepted, if those
                before it are; 0 behind the end of the turn.
            turns: queries in each turn.
        """
        steps = len(chances)
        of_query = chances.T.tolist()
        cycles, accepted, first = 0.0, [0.0] * steps, 0
        for turn in turns:
            begins = [1.0] + [0.0] * (turn + steps)  # probability that a cycle begins at each query
            for query in range(turn):
                reached = begins[query]
                if not reached:
                    continue
                cycles += reached
                for step, chance in enumerate(of_query[first + query]):
                    passed = reached * chance
                    accepted[step] += passed
                    begins[query + step + 1] += reached - passed
                    reached = passed
                    if not reached:
                        break
                begins[query + steps + 1] += reached
            first += turn
        return cls(cycles, tuple(accepted))


_WALKS = ("chain", "sampled chain", "tree", "sampled tree")


@dataclass(frozen=True)
class Acceptance:
    """Held-out measures, as sums and counts, so that they do not depend on how rows are batched."""

    asked: Tensor  # [S] float64, pairs of query and step
    agreed: Tensor  # [S], pairs whose most likely tokens are the same
    drawn: Tensor  # [S], sum of p of the most likely token of the head
    overlap: Tensor  # [S], sum of sum_v min(p_v, q_v)
    cycles: Tensor  # [4], of the walks
    accepted: Tensor  # [4, S]

    @classmethod
    def none(cls, steps: int) -> Acceptance:
        walks = len(_WALKS)
        sizes = ((steps,), (steps,), (steps,), (steps,), (walks,), (walks, steps))
        return cls(*(torch.zeros(size, dtype=torch.float64) for size in sizes))

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def summed(self, add: Callable[[Sequence[Tensor]], None], device: torch.device) -> Acceptance:
        """Summed over processes by `add`, which takes tensors of a device."""
        parts = [part.to(device, copy=True) for part in vars(self).values()]
        add(parts)
        return Acceptance(*(part.cpu() for part in parts))

    @property
    def rates(self) -> tuple[float, ...]:
        """[S], top-1 agreement of each draft step; 0 where nothing was asked."""
        return self._mean(self.agreed)

    @property
    def tokens_per_step(self) -> float:
        """With a chain at temperature 0."""
        return self.walk(0).tokens_per_step

    def walk(self, number: int) -> Walk:
        return Walk(self.cycles[number].item(), tuple(self.accepted[number].tolist()))

    def record(self) -> dict[str, Any]:
        chain, sampled, tree, sampled_tree = (self.walk(number) for number in range(len(_WALKS)))
        steps = len(self.asked)
        return {
            "agreement": _rounded(self.rates),
            "acceptance": _rounded(chain.acceptance),
            "accepted_per_step": round(chain.accepted_per_step, 5),
            "tokens_per_step": round(chain.tokens_per_step, 5),
            "agreed": self.agreed.long().tolist(),
            "asked": self.asked.long().tolist(),
            "cycles": round(chain.cycles),
            "accepted": round(sum(chain.accepted)),
            "sampled": {
                "agreement": _rounded(self._mean(self.drawn)),
                "overlap": _rounded(self._mean(self.overlap)),
                "acceptance": _rounded(sampled.acceptance),
                "tokens_per_step": round(sampled.tokens_per_step, 5),
            },
            "tree": {
                "children": list(_children(steps)),
                "nodes": tree_nodes(steps),
                "tokens_per_step": round(tree.tokens_per_step, 5),
                "sampled_tokens_per_step": round(sampled_tree.tokens_per_step, 5),
            },
        }

    def __str__(self) -> str:
        chain, sampled, tree, _ = (self.walk(number) for number in range(len(_WALKS)))
        return (
            f"{format_rates(self.rates)}, {chain.tokens_per_step:.2f} tokens a step "
            f"({sampled.tokens_per_step:.2f} at temperature 1, {tree.tokens_per_step:.2f} with a tree)"
        )

    def _mean(self, sums: Tensor) -> tuple[float, ...]:
        return tuple((sums / self.asked.clamp(min=1)).tolist())


@torch.no_grad()
def measure(
    head: DraftHead, batch: TttBatch, steps: int, target: TargetLogits, log_norm: Tensor
) -> Acceptance:
    """What the head in its present state is worth on a batch.

    Args:
        log_norm: [Q] fp32, log of the sum of exponentials of the target's logits over its whole vocabulary.
    """
    unrolled = unroll(head, batch, steps)
    states, rows = unrolled.states, unrolled.weight.to(unrolled.states.dtype)
    queries, size = states.shape[1], len(rows)
    shifts = torch.arange(steps, device=states.device)[:, None]  # [S, 1]
    counted = batch.counted[:steps]
    most = max(TREE)
    found = torch.zeros(4, steps, queries, device=states.device)  # hit, hit in tree, p, p in tree
    overlap = torch.zeros(steps, dtype=torch.float64, device=states.device)
    children = torch.tensor(_children(steps), device=states.device)[:, None, None]  # [S, 1, 1]
    used = torch.arange(most, device=states.device) < children  # [S, 1, k]
    at_once = max(1, (LOGITS_AT_ONCE if states.is_cuda else LOGITS_AT_ONCE_CPU) // (steps * size))
    for at in torch.arange(queries, device=states.device).split(at_once):
        query = at - shifts  # [S, c], that asks for these positions
        asks = (query >= 0) & counted[shifts, query.clamp(min=0)]
        query = query.clamp(min=0)
        z = (states[shifts, query].flatten(0, 1) @ rows.T).view(steps, len(at), size).float()
        p = (target.logits(at).float() - log_norm[at, None]).exp()  # [c, Vd]
        top = z.topk(min(most, size)).indices  # [S, c, k]
        hits = (top == target.labels[at][:, None]).float()
        p_top = p.expand(steps, -1, -1).gather(-1, top)
        overlap += (torch.minimum(z.softmax(-1), p).sum(-1) * asks).sum(1)
        width = used[..., : top.shape[-1]]
        values = torch.stack((hits[..., 0], (hits * width).sum(-1), p_top[..., 0], (p_top * width).sum(-1)))
        found.view(4, -1).index_add_(1, (query + shifts * queries).flatten(), (values * asks).flatten(1))
    hit, hit_tree, drawn, drawn_tree = found.double().cpu().clamp(max=1)
    turns = batch.turns
    walks = [Walk.along(chances, turns) for chances in (hit, drawn, hit_tree, drawn_tree)]
    return Acceptance(
        asked=counted.sum(1).double().cpu(),
        agreed=hit.sum(1),
        drawn=drawn.sum(1),
        overlap=overlap.cpu(),
        cycles=torch.tensor([walk.cycles for walk in walks], dtype=torch.float64),
        accepted=torch.tensor([walk.accepted for walk in walks], dtype=torch.float64),
    )


def tree_nodes(steps: int) -> int:
    """Nodes of the tree that is replayed."""
    nodes, level = 0, 1
    for children in _children(steps):
        level *= children
        nodes += level
    return nodes


def _children(steps: int) -> tuple[int, ...]:
    return (TREE + (1,) * steps)[:steps]


def _rounded(rates: Sequence[float]) -> list[float]:
    return [round(rate, 5) for rate in rates]


def format_rates(rates: Sequence[float]) -> str:
    """`.59/.51/.46`"""
    return "/".join(f"{rate:.2f}".removeprefix("0") for rate in rates)
