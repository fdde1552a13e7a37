"""Triton kernels of `kernels.accept`: the formula, its source and its cost are there.

No host synchronisation, and at most three launches: where tokens are filtered, one program a node finds the
threshold (`kernels.filters_triton`); one program a (node, vocabulary tile), or a tile of the LM head for all
nodes, leaves the tile's best score and token; one program a sequence reduces the tiles and walks the tree.
What lies between is [B * N, tiles], 8 bytes each."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.accept import Acceptance
from kernels.filters import Filters
from kernels.filters_triton import filter_floor_triton, masked_logits
from kernels.noise_triton import gumbel_rows, gumbel_tile

_BLOCK = 1024


@triton.jit
def _tile_kernel(
    logits_ptr,
    logits_stride_batch,
    logits_stride_node,
    allowed_ptr,
    floor_ptr,
    positions_ptr,
    temperature_ptr,
    seed_ptr,
    sample_ptr,
    best_ptr,
    token_ptr,
    nodes,
    vocab_size,
    FILTERED: tl.constexpr,
    ALLOWED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B * N, tiles): best score and its lowest token in one tile."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    sequence = row // nodes
    logits_ptr += sequence * logits_stride_batch + (row % nodes) * logits_stride_node
    allowed_ptr += row * tl.cdiv(vocab_size, 32)
    score = masked_logits(logits_ptr, allowed_ptr, tile * BLOCK, vocab_size, ALLOWED, BLOCK)
    temperature = tl.load(temperature_ptr + sequence)
    if temperature > 0:
        score = tl.div_rn(score, tl.zeros_like(score) + temperature)
        if FILTERED:
            score = tl.where(score >= tl.load(floor_ptr + row), score, float("-inf"))
        if tl.max(score, axis=0) > float("-inf"):  # noise cannot bring back what is ruled out
            score += gumbel_tile(
                tl.load(seed_ptr + sequence),
                tl.load(sample_ptr + sequence),
                tl.load(positions_ptr + row) + 1,
                tile * (BLOCK // 4),
                BLOCK // 4,
            )
    best, index = tl.max(score, axis=0, return_indices=True)
    out = row * tl.num_programs(1) + tile
    tl.store(best_ptr + out, best)
    tl.store(token_ptr + out, tile * BLOCK + index)


@triton.jit
def _head_kernel(
    states_ptr,
    states_stride_row,
    states_stride_dim,
    weight_ptr,
    weight_stride_row,
    weight_stride_dim,
    allowed_ptr,
    positions_ptr,
    temperature_ptr,
    seed_ptr,
    sample_ptr,
    best_ptr,
    token_ptr,
    scale,
    softcap,
    rows,
    nodes,
    vocab_size,
    width,
    SOFTCAP: tl.constexpr,
    ALLOWED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (blocks of ROWS rows, tiles of TOKENS tokens): logits of one tile of the LM head, and their best.

    Blocks of rows come first, so that they share a tile of the weight in the L2 cache.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile = tl.program_id(1)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    # Rows and tokens past the end repeat the last: nothing to mask, and their scores are not used.
    states_ptr += tl.minimum(row, rows - 1).to(tl.int64)[:, None] * states_stride_row
    weight_ptr += tl.minimum(token, vocab_size - 1).to(tl.int64)[:, None] * weight_stride_row
    logits = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in tl.range(0, width, WIDTH, num_stages=STAGES):
        states_tile = states_ptr + (start + column)[None, :] * states_stride_dim
        weight_tile = weight_ptr + (start + column)[None, :] * weight_stride_dim
        if EVEN:
            states, weight = tl.load(states_tile), tl.load(weight_tile)
        else:
            inside = (start + column < width)[None, :]
            states = tl.load(states_tile, mask=inside, other=0.0)
            weight = tl.load(weight_tile, mask=inside, other=0.0)
        logits = tl.dot(states, tl.trans(weight), logits, input_precision="ieee")
    logits *= scale
    if SOFTCAP:
        logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
    visible = (row < rows)[:, None] & (token < vocab_size)[None, :] & (logits == logits)
    if ALLOWED:
        words = tl.cdiv(vocab_size, 32)
        word = tl.load(
            allowed_ptr + row.to(tl.int64)[:, None] * words + (token // 32)[None, :], mask=visible, other=0
        )
        visible = visible & (((word >> (token % 32)[None, :]) & 1) != 0)
    score = tl.where(visible, logits, float("-inf"))
    sequence = row // nodes
    temperature = tl.load(temperature_ptr + sequence, mask=row < rows, other=0.0)
    if tl.max(temperature, axis=0) > 0:
        noise = gumbel_rows(
            tl.load(seed_ptr + sequence, mask=row < rows, other=0),
            tl.load(sample_ptr + sequence, mask=row < rows, other=0),
            tl.load(positions_ptr + row, mask=row < rows, other=0) + 1,
            tile * (TOKENS // 4),
            ROWS,
            TOKENS // 4,
        )
        hot = (temperature > 0)[:, None]
        heat = tl.zeros_like(score) + tl.where(temperature > 0, temperature, 1.0)[:, None]
        score = tl.where(hot, tl.div_rn(score, heat) + noise, score)
    best, index = tl.max(score, axis=1, return_indices=True)
    out = row.to(tl.int64) * tl.num_programs(1) + tile
    tl.store(best_ptr + out, best, mask=row < rows)
    tl.store(token_ptr + out, tile * TOKENS + index, mask=row < rows)


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


def _walk(best: Tensor, token: Tensor, tokens: Tensor, parents: Tensor) -> Acceptance:
    """best fp32 and token int32 [B * N, tiles]; tokens and parents [B, N]."""
    batch, nodes = tokens.shape
    path, drawn = (torch.empty(batch, nodes, dtype=torch.int64, device=best.device) for _ in range(2))
    count, bonus = (torch.empty(batch, dtype=torch.int64, device=best.device) for _ in range(2))
    padded = triton.next_power_of_2(nodes)
    _walk_kernel[(batch,)](
        best,
        token,
        tokens.contiguous(),
        parents.contiguous(),
        path,
        count,
        bonus,
        drawn,
        nodes,
        best.shape[1],
        NODES=padded,
        TILES=walk_tiles(padded),
    )
    return Acceptance(path=path, count=count, token=bonus, drawn=drawn)


def walk_tiles(padded_nodes: int) -> int:
    """Vocabulary tiles that the walk reduces at a time: 2,048 numbers in all."""
    return max(16, 2048 // padded_nodes)


def accept_tree_triton(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    sample: Tensor,
    *,
    filters: Filters | None = None,
    allowed: Tensor | None = None,
) -> Acceptance:
    """`kernels.accept.accept_tree`."""
    batch, nodes, vocab_size = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    if allowed is not None:
        allowed = allowed.contiguous()
    temperature = temperature.contiguous()
    floor = temperature if filters is None else filter_floor_triton(logits, temperature, filters, allowed)
    tiles = triton.cdiv(vocab_size, _BLOCK)
    best = torch.empty(batch * nodes, tiles, dtype=torch.float32, device=logits.device)
    token = torch.empty(batch * nodes, tiles, dtype=torch.int32, device=logits.device)
    _tile_kernel[(batch * nodes, tiles)](
        logits,
        logits.stride(0),
        logits.stride(1),
        token if allowed is None else allowed,
        floor,
        positions.contiguous(),
        temperature,
        seed.contiguous(),
        sample.contiguous(),
        best,
        token,
        nodes,
        vocab_size,
        FILTERED=filters is not None,
        ALLOWED=allowed is not None,
        BLOCK=_BLOCK,
    )
    return _walk(best, token, tokens, parents)


def head_tiles(rows: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows and tokens of a tile of the fused LM head, and warps of a program."""
    if dtype == torch.float32:
        return 16, 32, 4
    block = min(128, max(16, triton.next_power_of_2(rows)))
    return block, 128 if block < 128 else 64, 4 if block < 64 else 8


def accept_states_triton(
    states: Tensor,
    weight: Tensor,
    tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    sample: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    allowed: Tensor | None = None,
) -> Acceptance:
    """`kernels.accept.accept_states`."""
    batch, nodes, width = states.shape
    vocab_size = weight.shape[0]
    flat = states.reshape(batch * nodes, width)
    block_rows, block_tokens, warps = head_tiles(batch * nodes, states.dtype)
    columns = 32 if states.dtype == torch.float32 else 64
    tiles = triton.cdiv(vocab_size, block_tokens)
    best = torch.empty(batch * nodes, tiles, dtype=torch.float32, device=states.device)
    token = torch.empty(batch * nodes, tiles, dtype=torch.int32, device=states.device)
    _head_kernel[(triton.cdiv(batch * nodes, block_rows), tiles)](
        flat,
        *flat.stride(),
        weight,
        *weight.stride(),
        token if allowed is None else allowed.contiguous(),
        positions.contiguous(),
        temperature.contiguous(),
        seed.contiguous(),
        sample.contiguous(),
        best,
        token,
        scale,
        1.0 if softcap is None else softcap,
        batch * nodes,
        nodes,
        vocab_size,
        width,
        SOFTCAP=softcap is not None,
        ALLOWED=allowed is not None,
        ROWS=block_rows,
        TOKENS=block_tokens,
        WIDTH=columns,
        EVEN=width % columns == 0,
        STAGES=3,
        num_warps=warps,
    )
    return _walk(best, token, tokens, parents)
