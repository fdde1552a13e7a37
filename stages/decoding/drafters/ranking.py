"""The best children of a node, ranked by a drafter's scores and, at a temperature, by the target's noise
too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import gumbel_noise
from kernels.cpu import DTYPES, ops_loaded
from stages.decoding.drafters.calibration import Calibrations
from stages.decoding.drafters.strength import POOL, NoiseStrength, Pool, with_noise
from stages.decoding.growth import TreeGrowth
from stages.decoding.sampling import SamplingParams, signed


@dataclass
class Node:
    """A node whose children are ranked.

    position, depth: where a child would stand in the sequence, and in the tree.
    pool: what was ranked with noise, to learn from.
    """

    params: SamplingParams
    position: int
    depth: int
    pool: Pool | None = None


class Ranking:
    """Ranks children, and learns from what the target draws how to."""

    def __init__(self, draft_ids: Tensor, calibrations: Calibrations) -> None:
        """``draft_ids``: int64 [Vd], target ids of the drafter's vocabulary."""
        self.strength = NoiseStrength()
        self.draft_ids = draft_ids
        self._calibrations = calibrations

    def children(
        self, nodes: Sequence[Node], logits: Tensor, width: int
    ) -> list[tuple[list[int], list[float]]]:
        """The ``width`` best children of each node, target ids and log-probabilities, best first.

        Args:
            nodes: R of them; those at a temperature are given their pool.
            logits: [R, Vd], the drafter's scores of a child.
        """
        width = min(width, logits.shape[-1])
        if logits.device.type == "cpu" and logits.dtype in DTYPES and ops_loaded():
            tokens, scores = self._by_op(nodes, logits, width)
            return list(zip(tokens.tolist(), scores.tolist(), strict=True))
        logits = logits.float()
        if all(node.params.temperature == 0 for node in nodes):
            best = logits.topk(width, dim=-1)
            tokens, scores = self.draft_ids[best.indices], best.values - logits.logsumexp(-1, keepdim=True)
        else:
            tokens, scores = self._with_noise(nodes, logits, width)
        return list(zip(tokens.tolist(), scores.tolist(), strict=True))

    def _by_op(self, nodes: Sequence[Node], logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """By the CPU op, which computes the same up to rounding."""
        drawn = [node.params.temperature > 0 for node in nodes]
        pool = min(max(POOL, width), logits.shape[-1]) if any(drawn) else 0
        tokens, scores, ids, log_probs, noise = torch.ops.eagle_cpu.rank(
            logits,
            self.draft_ids,
            [node.params.temperature for node in nodes],
            self._strengths(nodes),
            [signed(node.params.seed) for node in nodes],
            [node.params.sample for node in nodes],
            [node.position for node in nodes],
            pool,
            width,
        )
        for row, node in enumerate(nodes):
            if drawn[row]:
                node.pool = Pool(ids[row], log_probs[row], noise[row], node.depth)
        return tokens, scores

    def _strengths(self, nodes: Sequence[Node]) -> list[float]:
        return [
            self.strength.at(node.params.temperature, node.depth) if node.params.temperature > 0 else 0.0
            for node in nodes
        ]

    def _with_noise(self, nodes: Sequence[Node], logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        temperatures = [node.params.temperature or 1.0 for node in nodes]
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
        pooled = logits.topk(min(max(POOL, width), logits.shape[-1]), dim=-1)
        ids, log_probs = self.draft_ids[pooled.indices], pooled.values - logits.logsumexp(-1, keepdim=True)
        keys = [[signed(node.params.seed), node.params.sample, node.position] for node in nodes]
        seed, sample, position = torch.tensor(keys, device=ids.device).unbind(1)
        noise = gumbel_noise(seed, sample, position, ids)
        for row, node in enumerate(nodes):
            if node.params.temperature > 0:
                node.pool = Pool(ids[row], log_probs[row], noise[row], node.depth)
        strengths = torch.tensor(self._strengths(nodes), device=ids.device)[:, None]
        ranked = with_noise(log_probs, noise, strengths)
        top = ranked.topk(width, dim=-1)
        return ids.gather(1, top.indices), top.values

    def learn(
        self, temperature: float, growth: TreeGrowth, nodes: Mapping[int, Node], truth: Sequence[int]
    ) -> None:
        """Compare a tree with what the target has drawn.

        Args:
            nodes: by candidate of the growth, -1 the root.
            truth: the tokens that followed the root.
        """
        self._calibrations.at(temperature).observe(growth.outcomes(truth))
        for candidate, token in zip(growth.path(truth), truth, strict=False):
            node = nodes.get(candidate)
            if node is not None and node.pool is not None:
                self.strength.observe(temperature, node.pool, token)
