"""Triton kernel of `kernels.draft_topk`: the formula, its source and its cost are there.

One program a node walks the vocabulary once. Beside the running sum of exponentials it keeps the best tokens
so far in a list; while the tile's best beats the list's worst, it takes that place. Only the first tile fills
the list: of a vocabulary in no particular order, tile number t changes about k / t of its places."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.draft_topk import DraftTopK
from kernels.noise_triton import gumbel_tile, gumbel_tokens

_BLOCK = 4096


@triton.jit
def _topk_kernel(
    logits_ptr,
    logits_stride_row,
    scores_ptr,
    target_ids_ptr,
    temperature_ptr,
    strength_ptr,
    positions_ptr,
    seed_ptr,
    sample_ptr,
    draft_id_ptr,
    token_ptr,
    score_ptr,
    vocab_size,
    k,
    MAPPED: tl.constexpr,
    HEATED: tl.constexpr,
    NOISE: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (M,)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride_row
    temperature = tl.full([], 0.0, tl.float32)
    if HEATED:
        temperature = tl.load(temperature_ptr + row)
    heat = tl.where(temperature > 0.0, temperature, 1.0)

    place = tl.arange(0, K)
    # Places from k on hold +inf, which nothing beats.
    best = tl.where(place < k, float("-inf"), float("inf"))
    held = tl.zeros([K], tl.int32) + 2147483647
    worst = tl.full([], float("-inf"), tl.float32)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < vocab_size
        z = tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
        if HEATED:
            z = tl.div_rn(z, tl.zeros_like(z) + heat)
        if NOISE:  # noqa: SIM102, a constant must stand alone
            if temperature > 0.0:
                seed, sample = tl.load(seed_ptr + row), tl.load(sample_ptr + row)
                position = tl.load(positions_ptr + row) + 1
                if MAPPED:
                    ids = tl.load(target_ids_ptr + token, mask=inside, other=0)
                    noise = gumbel_tokens(seed, sample, position, ids)
                else:
                    noise = gumbel_tile(seed, sample, position, start // 4, BLOCK // 4)
                z += tl.load(strength_ptr + row) * noise
        # Whatever the logits hold, every place of the list finds a token.
        z = tl.where(inside, tl.maximum(z, -3.0e38), float("-inf"))
        top = tl.max(z, axis=0)
        new_peak = tl.maximum(peak, top)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(z - base), axis=0)
        peak = new_peak
        # Tokens come in ascending order, so a tie with one that is held has lost.
        while top > worst:
            first = tl.min(tl.where(z == top, token, 2147483647), axis=0)
            # Of equal worst ones, the latest token goes, or an empty place.
            lowest = best == worst
            last = tl.max(tl.where(lowest, held, -1), axis=0)
            spot = tl.min(tl.where(lowest & (held == last), place, K), axis=0)
            best = tl.where(place == spot, top, best)
            held = tl.where(place == spot, first, held)
            worst = tl.min(best, axis=0)
            z = tl.where(token == first, float("-inf"), z)
            top = tl.max(z, axis=0)

    shift = tl.load(scores_ptr + row) - (peak + tl.log(total))
    for rank in range(k):
        free = place < k
        top = tl.max(tl.where(free, best, float("-inf")), axis=0)
        first = tl.min(tl.where(free & (best == top), held, 2147483647), axis=0)
        best = tl.where(free & (held == first), float("-inf"), best)
        held = tl.where(free & (held == first), 2147483647, held)
        tl.store(draft_id_ptr + row * k + rank, first.to(tl.int64))
        if MAPPED:
            tl.store(token_ptr + row * k + rank, tl.load(target_ids_ptr + first))
        tl.store(score_ptr + row * k + rank, top + shift)


def draft_topk_triton(
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
    """`kernels.draft_topk.draft_topk`."""
    nodes, vocab_size = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    draft_id = torch.empty(nodes, k, dtype=torch.int64, device=logits.device)
    token = draft_id if target_ids is None else torch.empty_like(draft_id)
    score = torch.empty(nodes, k, dtype=torch.float32, device=logits.device)
    rest = (target_ids, temperature, strength, positions, seed, sample)
    _topk_kernel[(nodes,)](
        logits,
        logits.stride(0),
        scores.contiguous(),
        *(scores if t is None else t.contiguous() for t in rest),  # those missing are not read
        draft_id,
        token,
        score,
        vocab_size,
        k,
        MAPPED=target_ids is not None,
        HEATED=temperature is not None,
        NOISE=strength is not None,
        K=triton.next_power_of_2(k),
        BLOCK=min(_BLOCK, max(16, triton.next_power_of_2(vocab_size))),
        num_warps=8,
    )
    return DraftTopK(draft_id, token, score)
