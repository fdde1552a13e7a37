"""Triton kernels of `kernels.tree_attention`: the formula, its source and its cost are there.

Grid (block of rows, split, sequence and KV head). The rows are the nodes of all query heads of the group, up
to 128 a block (`tiles`), so a split reads its part of the prefix once for all of them; where there are more
rows, the blocks of a split are neighbours in the grid and share what they read in the L2 cache. The prefix is
walked in whole tiles without a mask; what is left of it lies in the cache right before the tree, and the last
split takes both together, masked by ancestor words. With a sliding window every tile is masked by position.

Splits leave their normalised output and the logarithm of their sum of exponentials (base 2) in fp32, and a
second launch merges them: out = sum_s 2^(lse_s - M) out_s / sum_s 2^(lse_s - M) with M the largest lse. An
empty split has lse = -inf and no weight. A single split writes the output itself.
The number of splits depends on shapes alone, never on lengths, so a launch can be captured in a graph.

Traffic besides the cache: with S > 1 splits, S * Hq * N * (D + 1) * 4 bytes a sequence written and read
again, mostly within the L2 cache."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = 1.4426950408889634
_MAX_SPLITS = 64


@triton.jit
def _bits(words):
    """Set bits of uint64 words, by halving sums."""
    x = words - ((words >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 0x7F).to(tl.int32)


@triton.jit
def _tile(
    base_ptr,
    row,
    stride_row,
    stride_dim,
    rows,
    dim,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    MASKED: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Rows `row` to `row + ROWS - 1` of a cache head, [ROWS, DIM]; those from `rows` on are zero if
    MASKED."""
    # One 64-bit product a tile; within it 32 bits suffice.
    base_ptr += row.to(tl.int64) * stride_row
    line, column = tl.arange(0, ROWS), tl.arange(0, DIM)
    pointers = base_ptr + line[:, None] * stride_row + column[None, :] * stride_dim
    if MASKED and EVEN:
        return tl.load(pointers, mask=(row + line < rows)[:, None], other=0.0)
    if MASKED:
        return tl.load(pointers, mask=(row + line < rows)[:, None] & (column < dim)[None, :], other=0.0)
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(column < dim)[None, :], other=0.0)


@triton.jit
def _attend(
    query,
    key,
    value,
    visible,
    acc,
    top,
    total,
    scale,
    softcap,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One online-softmax step over a tile of keys, those not `visible` [M, K] left out if MASKED.

    scale takes scores to base 2, or to units of the cap where there is one.
    """
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score) - 1.0)
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    # A row that has seen nothing keeps -inf; subtracting 0 there instead leaves exp2(-inf) = 0, not NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def _split_kernel(
    query_ptr,
    query_stride_batch,
    query_stride_head,
    query_stride_node,
    query_stride_dim,
    key_ptr,
    key_stride_slot,
    key_stride_head,
    key_stride_row,
    key_stride_dim,
    value_ptr,
    value_stride_slot,
    value_stride_head,
    value_stride_row,
    value_stride_dim,
    slots_ptr,
    lengths_ptr,
    ancestors_ptr,
    out_ptr,
    lse_ptr,
    scale,
    softcap,
    window,
    kv_heads,
    group,
    nodes,
    tree_rows,
    dim,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    EVEN: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (blocks of ROWS rows, splits, B * Hkv)."""
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    pair = tl.program_id(2).to(tl.int64)
    sequence = pair // kv_heads
    kv_head = pair % kv_heads
    slot = tl.load(slots_ptr + sequence)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    key_ptr += slot * key_stride_slot + kv_head * key_stride_head
    value_ptr += slot * value_stride_slot + kv_head * value_stride_head

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS], group-major as [group, nodes]
    real = row < group * nodes
    node = row % nodes
    column = tl.arange(0, DIM)
    query_ptr += sequence * query_stride_batch + kv_head * group * query_stride_head
    query = tl.load(
        query_ptr
        + (row // nodes).to(tl.int64)[:, None] * query_stride_head
        + node[:, None] * query_stride_node
        + column[None, :] * query_stride_dim,
        mask=real[:, None] & (column < dim)[None, :],
        other=0.0,
    )
    words = tl.load(ancestors_ptr + sequence * nodes + node, mask=real, other=0).to(tl.uint64)  # [ROWS]
    position = length + _bits(words) - 1

    acc = tl.zeros([ROWS, DIM], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    # Tiles of rows that any node may see: whole ones of the prefix, shared out, then those with the tree.
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - window + 1, 0)
    whole = (length - first) // KEYS
    rest = first + whole * KEYS
    end = length + tree_rows
    tiles = whole + tl.cdiv(end - rest, KEYS)
    mine = split * tiles // splits  # shares differ by one tile at most
    behind = tl.minimum((split + 1) * tiles // splits, whole)
    for tile in tl.range(mine, behind, num_stages=STAGES):
        start = first + tile * KEYS
        key = _tile(key_ptr, start, key_stride_row, key_stride_dim, end, dim, KEYS, DIM, False, EVEN)
        value = _tile(value_ptr, start, value_stride_row, value_stride_dim, end, dim, KEYS, DIM, False, EVEN)
        visible = position[:, None] - (start + tl.arange(0, KEYS))[None, :] < window
        acc, top, total = _attend(
            query, key, value, visible, acc, top, total, scale, softcap, WINDOW, SOFTCAP
        )

    if split == splits - 1:
        for tile in tl.range(0, tl.cdiv(end - rest, KEYS), num_stages=1):
            start = rest + tile * KEYS
            key = _tile(key_ptr, start, key_stride_row, key_stride_dim, end, dim, KEYS, DIM, True, EVEN)
            value = _tile(
                value_ptr, start, value_stride_row, value_stride_dim, end, dim, KEYS, DIM, True, EVEN
            )
            other = start + tl.arange(0, KEYS) - length  # the node of a row, negative in the prefix
            shift = tl.minimum(tl.maximum(other, 0), 63).to(tl.uint64)
            path = words[:, None] >> shift[None, :]  # the row's own bit and those above it
            prefix = (other < 0)[None, :]
            visible = (prefix | ((path & 1) != 0)) & (other < tree_rows)[None, :]
            if WINDOW:
                near = tl.where(prefix, position[:, None] - (length + other)[None, :] < window, True)
                visible = visible & near & (prefix | (_bits(path) <= window))
            acc, top, total = _attend(
                query, key, value, visible, acc, top, total, scale, softcap, True, SOFTCAP
            )

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    acc = tl.where((words == 0)[:, None], 0.0, acc)
    out = (pair * group * nodes + row) * splits + split  # [B, Hq, N, splits(, D)]
    tl.store(
        out_ptr + out[:, None] * dim + column[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=real[:, None] & (column < dim)[None, :],
    )
    if splits > 1:
        tl.store(lse_ptr + out, top + tl.log2(total), mask=real)


@triton.jit
def _merge_kernel(part_ptr, lse_ptr, out_ptr, splits, dim, SPLITS: tl.constexpr, DIM: tl.constexpr):
    """Grid (B * Hq * N,): one output row each."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, DIM)
    part = row * splits + split
    lse = tl.load(lse_ptr + part, mask=split < splits, other=float("-inf"))
    peak = tl.max(lse, axis=0)
    weight = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weight, axis=0)
    outs = tl.load(
        part_ptr + part[:, None] * dim + column[None, :],
        mask=(split < splits)[:, None] & (column < dim)[None, :],
        other=0.0,
    )
    out = tl.sum(outs * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * dim + column, out.to(out_ptr.dtype.element_ty), mask=column < dim)


class Tiles(NamedTuple):
    """How the split kernel is tiled: rows and keys of a tile, warps of a program, stages of the pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiles(rows: int, padded_dim: int, dtype: torch.dtype, *, hip: bool = False) -> Tiles:
    """A tiling that fits the shared memory and the registers of every GPU that is compiled for.

    IEEE fp32 has no matrix units, and its large tiles unroll into minutes of compilation.
    """
    padded_rows = max(16, triton.next_power_of_2(rows))
    if dtype == torch.float32:
        return Tiles(16, 16, 4 if padded_dim <= 64 else 8, 2)
    if hip:
        return Tiles(min(padded_rows, 64 if padded_dim <= 128 else 32), 32, 4, 2)
    if padded_dim > 128:
        block = min(padded_rows, 64)
        return Tiles(block, 32, 8 if block == 64 else 4, 2)
    block = min(padded_rows, 128)
    return Tiles(block, 64, 8 if block == 128 else 4, 3 if block <= 32 else 2)


def split_count(programs: int, cache_tiles: int, places: int) -> int:
    """Splits over the keys for `programs` blocks of rows: the fewest that keep the GPU nearly as busy as
    can be.

    `places` programs run at a time, and a last round that fills only some of them idles the others. A split
    has two tiles of a full cache at least."""
    most = max(1, min(_MAX_SPLITS, cache_tiles // 2))
    busy = []
    for splits in range(1, most + 1):
        rounds = -(-programs * splits // places)
        busy.append(programs * splits / (rounds * places))
    return 1 + next(i for i, share in enumerate(busy) if share >= 0.9 * max(busy))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def tree_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor | slice,
    lengths: Tensor,
    ancestors: Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree_rows: int | None = None,
    splits: int | None = None,
    tiling: Tiles | None = None,
) -> Tensor:
    """`kernels.tree_attention.tree_attention`; `splits` and `tiling` override what is chosen by shape."""
    batch, query_heads, nodes, dim = query.shape
    kv_heads, cache_rows = key_cache.shape[1:3]
    group = query_heads // kv_heads
    device = query.device
    if isinstance(slots, slice):
        slots = torch.arange(*slots.indices(key_cache.shape[0]), device=device)
    slots, lengths, ancestors = (t.contiguous() for t in (slots, lengths, ancestors))
    padded_dim = max(16, triton.next_power_of_2(dim))
    if tiling is None:
        tiling = tiles(group * nodes, padded_dim, query.dtype, hip=torch.version.hip is not None)
    row_blocks = triton.cdiv(group * nodes, tiling.rows)
    if splits is None:
        programs = batch * kv_heads * row_blocks
        places = _processors(device) * max(1, 8 // tiling.warps)  # as their registers allow
        splits = split_count(programs, cache_rows // tiling.keys, places)
    out = torch.empty(batch, query_heads, nodes, dim, dtype=query.dtype, device=device)
    part, lse = out, out  # a single split has no use for lse
    if splits > 1:
        part = torch.empty(batch, query_heads, nodes, splits, dim, dtype=torch.float32, device=device)
        lse = torch.empty(batch, query_heads, nodes, splits, dtype=torch.float32, device=device)
    _split_kernel[(row_blocks, splits, batch * kv_heads)](
        query,
        *query.stride(),
        key_cache,
        *key_cache.stride(),
        value_cache,
        *value_cache.stride(),
        slots,
        lengths,
        ancestors,
        part,
        lse,
        scale / softcap if softcap is not None else scale * _LOG2E,
        0.0 if softcap is None else softcap * _LOG2E,
        sliding_window or 0,
        kv_heads,
        group,
        nodes,
        nodes if tree_rows is None else tree_rows,
        dim,
        ROWS=tiling.rows,
        KEYS=tiling.keys,
        DIM=padded_dim,
        EVEN=padded_dim == dim,
        WINDOW=sliding_window is not None,
        SOFTCAP=softcap is not None,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
    )
    if splits > 1:
        _merge_kernel[(batch * query_heads * nodes,)](
            part,
            lse,
            out,
            splits,
            dim,
            SPLITS=triton.next_power_of_2(splits),
            DIM=padded_dim,
            num_warps=1 if splits * padded_dim <= 1024 else 4,
        )
    return out
