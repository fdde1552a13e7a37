"""Triton kernels of `kernels.tree_attention`: the formula, its source and its cost are there.

Grid (sequence and KV head, block of rows, split). The rows are all nodes of all query heads of the group, so
a split reads its part of the prefix once for all of them, without a mask but for its end; the last split adds
the tree block, masked by ancestor words. Every split leaves an unnormalised output with its maximum and sum
(base 2), and a second launch merges them: with M the largest maximum, out = sum acc 2^(m - M) / sum l 2^(m -
M). An empty split has m = -inf. The number of splits depends on shapes alone, never on lengths, so a launch
can be captured in a graph.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = 1.4426950408889634
_MAX_SPLITS = 32


@triton.jit
def _depth(words):
    """Set bits of int64 words minus one, by halving sums; masks make the arithmetic shifts logical."""
    x = words - ((words >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 0x7F) - 1


@triton.jit
def _attend(
    query,
    key_ptr,
    value_ptr,
    rows,
    rows_end,
    visible,
    acc,
    top,
    total,
    scale,
    softcap,
    key_stride_row,
    key_stride_dim,
    value_stride_row,
    value_stride_dim,
    dim,
    DIM: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One online-softmax step over the cache rows `rows` [K], seen where `visible` [M, K] or [1, K].

    scale takes scores to base 2, or to units of the cap where there is one.
    """
    column = tl.arange(0, DIM)
    inside = (rows < rows_end)[:, None] & (column < dim)[None, :]
    rows = rows.to(tl.int64)[:, None]
    key = tl.load(key_ptr + rows * key_stride_row + column[None, :] * key_stride_dim, mask=inside, other=0.0)
    value = tl.load(
        value_ptr + rows * value_stride_row + column[None, :] * value_stride_dim, mask=inside, other=0.0
    )
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score) - 1.0)
    score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, axis=1))
    # A row that has seen nothing keeps -inf; subtracting 0 there instead leaves exp2(-inf) = 0, not NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weight, axis=1)
    acc = acc * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
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
    acc_ptr,
    top_ptr,
    total_ptr,
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Grid (B * Hkv, blocks of ROWS rows, splits)."""
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    sequence = pair // kv_heads
    kv_head = pair % kv_heads
    slot = tl.load(slots_ptr + sequence)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)

    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # [ROWS], group-major as [group, nodes]
    real = row < group * nodes
    node = row % nodes
    column = tl.arange(0, DIM)
    query_ptr += sequence * query_stride_batch + kv_head * group * query_stride_head
    query = tl.load(
        query_ptr
        + (row // nodes)[:, None] * query_stride_head
        + node[:, None] * query_stride_node
        + column[None, :] * query_stride_dim,
        mask=real[:, None] & (column < dim)[None, :],
        other=0.0,
    )
    words = tl.load(ancestors_ptr + sequence * nodes + node, mask=real, other=0)  # int64 [ROWS]
    position = length + _depth(words).to(tl.int32)
    key_ptr += slot * key_stride_slot + kv_head * key_stride_head
    value_ptr += slot * value_stride_slot + kv_head * value_stride_head

    acc = tl.zeros([ROWS, DIM], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    # Prefix rows that any node may see, in whole tiles per split.
    first = length * 0
    if WINDOW:
        first = tl.maximum(length - window + 1, 0)
    share = tl.cdiv(tl.cdiv(length - first, KEYS), splits) * KEYS
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    for start in range(begin, end, KEYS):
        rows = start + tl.arange(0, KEYS)
        visible = (rows < end)[None, :]
        if WINDOW:
            visible = visible & (position[:, None] - rows[None, :] < window)
        acc, top, total = _attend(
            query,
            key_ptr,
            value_ptr,
            rows,
            end,
            visible,
            acc,
            top,
            total,
            scale,
            softcap,
            key_stride_row,
            key_stride_dim,
            value_stride_row,
            value_stride_dim,
            dim,
            DIM,
            SOFTCAP,
        )

    if split == splits - 1:
        for start in range(0, tree_rows, KEYS):
            other = start + tl.arange(0, KEYS)
            # Shifts of 64 and more are undefined; such nodes do not exist, and the bound hides them.
            bit = (words[:, None] >> tl.minimum(other, 63).to(tl.int64)[None, :]) & 1
            visible = (bit != 0) & (other < tree_rows)[None, :]
            if WINDOW:
                other_words = tl.load(ancestors_ptr + sequence * nodes + other, mask=other < nodes, other=0)
                other_position = length + _depth(other_words).to(tl.int32)
                visible = visible & (position[:, None] - other_position[None, :] < window)
            acc, top, total = _attend(
                query,
                key_ptr,
                value_ptr,
                length + other,
                length + tree_rows,
                visible,
                acc,
                top,
                total,
                scale,
                softcap,
                key_stride_row,
                key_stride_dim,
                value_stride_row,
                value_stride_dim,
                dim,
                DIM,
                SOFTCAP,
            )

    # [B * Hkv, group * nodes, splits(, D)]
    out = (pair * group * nodes + row) * splits + split
    tl.store(
        acc_ptr + out[:, None] * dim + column[None, :], acc, mask=real[:, None] & (column < dim)[None, :]
    )
    tl.store(top_ptr + out, top, mask=real)
    tl.store(total_ptr + out, total, mask=real)


@triton.jit
def _merge_kernel(
    acc_ptr,
    top_ptr,
    total_ptr,
    ancestors_ptr,
    out_ptr,
    query_heads,
    nodes,
    splits,
    dim,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Grid (B * Hq * N,): one output row each."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // (query_heads * nodes)
    word = tl.load(ancestors_ptr + sequence * nodes + row % nodes)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, DIM)
    partial = row * splits + split
    top = tl.load(top_ptr + partial, mask=split < splits, other=float("-inf"))
    total = tl.load(total_ptr + partial, mask=split < splits, other=0.0)
    acc = tl.load(
        acc_ptr + partial[:, None] * dim + column[None, :],
        mask=(split < splits)[:, None] & (column < dim)[None, :],
        other=0.0,
    )
    peak = tl.max(top, axis=0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(top - peak)
    total = tl.sum(total * weight, axis=0)
    out = tl.sum(acc * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    out = tl.where(word == 0, 0.0, out)
    tl.store(out_ptr + row * dim + column, out.to(out_ptr.dtype.element_ty), mask=column < dim)


def blocks(dtype: torch.dtype, padded_dim: int) -> tuple[int, int]:
    """Most rows and keys of a tile: what fits the shared memory of every GPU that is compiled for.

    IEEE fp32 has no tensor cores, and its large tiles unroll into minutes of compilation.
    """
    if dtype == torch.float32:
        return 16, 16
    return (64, 64) if padded_dim <= 128 else (64, 32)


def _splits(programs: int, tiles: int, device: torch.device) -> int:
    """Splits that fill the GPU twice over, each with at least four tiles of a full cache."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    )
    wanted = triton.cdiv(2 * processors, programs)
    return max(1, min(wanted, tiles // 4, _MAX_SPLITS))


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
) -> Tensor:
    """`kernels.tree_attention.tree_attention`; `splits` overrides the number of splits over the keys."""
    batch, query_heads, nodes, dim = query.shape
    tree_rows = nodes if tree_rows is None else tree_rows
    if sliding_window is not None and tree_rows != nodes:
        raise ValueError(
            "a sliding window needs the positions of all tree rows: attend from all of them at once"
        )
    kv_heads, cache_rows = key_cache.shape[1:3]
    group = query_heads // kv_heads
    if isinstance(slots, slice):
        slots = torch.arange(*slots.indices(key_cache.shape[0]), device=query.device)
    slots, lengths, ancestors = (t.contiguous() for t in (slots, lengths, ancestors))
    rows = group * nodes
    padded_dim = max(16, triton.next_power_of_2(dim))
    most_rows, block_keys = blocks(query.dtype, padded_dim)
    block_rows = min(most_rows, max(16, triton.next_power_of_2(rows)))
    row_blocks = triton.cdiv(rows, block_rows)
    if splits is None:
        splits = _splits(batch * kv_heads * row_blocks, cache_rows // block_keys, query.device)
    partial = (batch * kv_heads, rows, splits)
    acc = torch.empty(*partial, dim, dtype=torch.float32, device=query.device)
    top, total = (torch.empty(partial, dtype=torch.float32, device=query.device) for _ in range(2))
    cap = 0.0 if softcap is None else softcap
    _split_kernel[(batch * kv_heads, row_blocks, splits)](
        query,
        *query.stride(),
        key_cache,
        *key_cache.stride(),
        value_cache,
        *value_cache.stride(),
        slots,
        lengths,
        ancestors,
        acc,
        top,
        total,
        scale / softcap if softcap is not None else scale * _LOG2E,
        cap * _LOG2E,
        sliding_window or 0,
        kv_heads,
        group,
        nodes,
        tree_rows,
        dim,
        ROWS=block_rows,
        KEYS=block_keys,
        DIM=padded_dim,
        WINDOW=sliding_window is not None,
        SOFTCAP=softcap is not None,
        num_warps=4,
        num_stages=2,
    )
    out = torch.empty(batch, query_heads, nodes, dim, dtype=query.dtype, device=query.device)
    _merge_kernel[(batch * query_heads * nodes,)](
        acc,
        top,
        total,
        ancestors,
        out,
        query_heads,
        nodes,
        splits,
        dim,
        SPLITS=triton.next_power_of_2(splits),
        DIM=padded_dim,
        num_warps=1 if splits * padded_dim <= 1024 else 4,
    )
    return out
