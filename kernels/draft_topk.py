"""The best children of drafted nodes: log-softmax, noise, top-k and the score along the path, at once.

    z = logits / T + s * G(seed, sample, positions + 1, target_id)      log q = log_softmax(z)
    child scores = score of the parent + log q of the k largest

with T = 1 for a greedy sequence, whose noise has no strength. G is `kernels.noise`, the same number that the
target's own draw adds there, keyed by the target's token ids: with a strength s > 0 the drafter knows part of
what the target will draw. Ties go to the lowest index. Any ranking is lossless; the strength only moves
acceptance.

Cost: M * Vd logits are read once; with noise, one Philox call a token (or a four tokens, where draft and
target vocabulary are the same).

Source: EAGLE-2 (Li et al., arXiv 2406.16858) for the score; the noise: docs/architecture.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import use_triton
from kernels.noise import gumbel_noise, gumbel_noise_vocab


class DraftTopK(NamedTuple):
    """Children of M nodes, the best first.

    draft_id: int64 [M, k], ids of the draft vocabulary.
    token: int64 [M, k], the target's ids.
    score: fp32 [M, k], summed along the path from the root.
    """

    draft_id: Tensor
    token: Tensor
    score: Tensor


def draft_topk(
    logits: Tensor,
    scores: Tensor,
    k: int,
    *,
    target_ids: Tensor | None = None,
    temperature: Tensor | None = None,
    strength: Tensor | None = None,
    positions: Tensor | None = None,
    seed: Tensor | None = None,
    sample: Tensor | None = None,
) -> DraftTopK:
    """The k best children of each node.

    Args:
        logits: [M, Vd] of nodes of any sequences, finite.
        scores: fp32 [M], the nodes' own; 0 for a root.
        k: at most Vd.
        target_ids: int64 [Vd], the target's id of each draft token; None where they are the same.
        temperature: fp32 [M], of each node's sequence; None is greedy.
        strength: fp32 [M], s; None is no noise, and then the rest is not needed.
        positions: int64 [M], absolute position of each node's own token.
        seed: int64 [M], of each node's sequence; sample likewise.
    """
    if use_triton(logits):
        from kernels.draft_topk_triton import draft_topk_triton

        run = draft_topk_triton
    else:
        run = draft_topk_torch
    return run(
        logits,
        scores,
        k,
        target_ids=target_ids,
        temperature=temperature,
        strength=strength,
        positions=positions,
        seed=seed,
        sample=sample,
    )


def draft_topk_torch(
    logits: Tensor,
    scores: Tensor,
    k: int,
    *,
    target_ids: Tensor | None = None,
    temperature: Tensor | None = None,
    strength: Tensor | None = None,
    positions: Tensor | None = None,
    seed: Tensor | None = None,
    sample: Tensor | None = None,
) -> DraftTopK:
    """`draft_topk` in torch."""
    z = logits.float()
    if temperature is not None:
        z = z / torch.where(temperature > 0, temperature, 1.0)[:, None]
    if strength is not None:
        assert temperature is not None
        assert positions is not None
        assert seed is not None
        assert sample is not None
        if target_ids is None:
            noise = gumbel_noise_vocab(seed, sample, positions + 1, logits.shape[1])
        else:
            noise = gumbel_noise(seed, sample, positions + 1, target_ids.expand(logits.shape))
        z = z + torch.where(temperature > 0, strength, 0.0)[:, None] * noise
    best, index = z.sort(dim=-1, descending=True, stable=True)
    best, index = best[:, :k], index[:, :k]
    score = scores[:, None] + best - z.logsumexp(-1, keepdim=True)
    return DraftTopK(index, index if target_ids is None else target_ids[index], score)
