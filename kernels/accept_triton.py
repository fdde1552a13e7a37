"""Triton kernels of `kernels.accept`: the formula, its source and its cost are there.

Two launches and no host synchronisation: one program a (node, vocabulary tile) leaves the tile's best score
and token; one program a sequence reduces the tiles and walks the tree. What lies between is [B * N, tiles], 8
bytes each.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.accept import Acceptance
from kernels.noise_triton import gumbel_tile

_BLOCK = 1024


@triton.jit
def _tile_kernel(
    logits_ptr,
    stride_batch,
    stride_node,
    positions_ptr,
    temperature_ptr,
    seed_ptr,
    sample_ptr,
    best_ptr,
    token_ptr,
    nodes,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Grid (B * N, tiles): best score and its lowest token in one tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    sequence = row // nodes
    logits_ptr += sequence * stride_batch + (row % nodes) * stride_node
    token = tile * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperature_ptr + sequence)
    if temperature > 0:
        noise = gumbel_tile(
            tl.load(seed_ptr + sequence),
            tl.load(sample_ptr + sequence),
            tl.load(positions_ptr + row) + 1,
            tile * (BLOCK // 4),
            BLOCK // 4,
        )
        score = tl.div_rn(score, tl.zeros_like(score) + temperature) + noise
    best, index = tl.max(score, axis=0, return_indices=True)
    out = row * tl.num_programs(1) + tile
    tl.store(best_ptr + out, best)
    tl.store(token_ptr + out, tile * BLOCK + index)


@triton.jit
def _walk_kernel(
    best_ptr,
    token_ptr,
    tokens_ptr,
    parents_ptr,
    path_ptr,
    count_ptr,
    bonus_ptr,
    drawn_ptr,
    nodes,
    tiles,
    NODES: tl.constexpr,
    TILES: tl.constexpr,
):
    """Grid (B,): reduce the tiles of every node, then follow the drawn tokens down from the root."""
    sequence = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < nodes
    row = sequence * nodes + node  # [NODES]
    best = tl.full([NODES], float("-inf"), tl.float32)
    drawn = tl.zeros([NODES], tl.int32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        offset = row[:, None] * tiles + tile[None, :]
        valid = inside[:, None] & (tile < tiles)[None, :]
        score = tl.load(best_ptr + offset, mask=valid, other=float("-inf"))
        token = tl.load(token_ptr + offset, mask=valid, other=2147483647)
        top = tl.max(score, axis=1)
        # The lowest token among equals, here and across the loop: tiles come in ascending order.
        first = tl.min(tl.where(score == top[:, None], token, 2147483647), axis=1)
        drawn = tl.where((top > best) | (start == 0), first, drawn)
        best = tl.maximum(best, top)
    drawn = drawn.to(tl.int64)
    tl.store(drawn_ptr + row, drawn, mask=inside)

    tokens = tl.load(tokens_ptr + row, mask=inside, other=-1)
    parents = tl.load(parents_ptr + row, mask=inside, other=-2)
    path = tl.where(node == 0, 0, -1).to(tl.int64)
    current = tl.min(node, axis=0)
    chosen = tl.sum(tl.where(node == current, drawn, 0), axis=0)
    count = tl.max(node, axis=0) * 0 + 1
    child = tl.min(tl.where((parents == current) & (tokens == chosen), node, NODES), axis=0)
    while child < NODES:
        current = child
        path = tl.where(node == count, current, path)
        count += 1
        chosen = tl.sum(tl.where(node == current, drawn, 0), axis=0)
        child = tl.min(tl.where((parents == current) & (tokens == chosen), node, NODES), axis=0)
    tl.store(path_ptr + row, path, mask=inside)
    tl.store(count_ptr + sequence, count.to(tl.int64))
    tl.store(bonus_ptr + sequence, chosen)


def accept_tree_triton(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    sample: Tensor,
) -> Acceptance:
    """`kernels.accept.accept_tree`."""
    batch, nodes, vocab_size = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    tokens, parents, positions = (t.contiguous() for t in (tokens, parents, positions))
    temperature, seed, sample = (t.contiguous() for t in (temperature, seed, sample))
    device = logits.device
    tiles = triton.cdiv(vocab_size, _BLOCK)
    best = torch.empty(batch * nodes, tiles, dtype=torch.float32, device=device)
    token = torch.empty(batch * nodes, tiles, dtype=torch.int32, device=device)
    _tile_kernel[(batch * nodes, tiles)](
        logits,
        logits.stride(0),
        logits.stride(1),
        positions,
        temperature,
        seed,
        sample,
        best,
        token,
        nodes,
        vocab_size,
        BLOCK=_BLOCK,
    )
    path, drawn = (torch.empty(batch, nodes, dtype=torch.int64, device=device) for _ in range(2))
    count, bonus = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    _walk_kernel[(batch,)](
        best,
        token,
        tokens,
        parents,
        path,
        count,
        bonus,
        drawn,
        nodes,
        tiles,
        NODES=triton.next_power_of_2(nodes),
        TILES=16,
    )
    return Acceptance(path=path, count=count, token=bonus, drawn=drawn)
