"""Triton kernel of `kernels.compact`: the formula and its cost are there.

One program a (sequence, head, layer and side) takes four rows at a time: all are read, then all are written.
A thread holds the same elements of every row, so an element is read by the thread that later overwrites it,
in program order: no barrier is needed, whatever the GPU. A later row is read from behind every row written
before it, since path[k] >= k.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read(base, path_ptr, k, count, stride_row, column, stride_dim, inside):
    """Row path[k] of the tree, where it has to move."""
    node = tl.load(path_ptr + k, mask=k < count, other=0)
    moved = inside & (k < count) & (node != k)
    return tl.load(base + node * stride_row + column * stride_dim, mask=moved, other=0.0), moved


@triton.jit
def _compact_kernel(
    cache_ptr,
    stride_side,
    stride_layer,
    stride_slot,
    stride_head,
    stride_row,
    stride_dim,
    slots_ptr,
    lengths_ptr,
    path_ptr,
    count_ptr,
    layers,
    nodes,
    dim,
    DIM: tl.constexpr,
):
    """Grid (B, Hkv, 2 * L)."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    side = (tl.program_id(2) // layers).to(tl.int64)
    layer = (tl.program_id(2) % layers).to(tl.int64)
    count = tl.load(count_ptr + sequence).to(tl.int32)
    base = cache_ptr + side * stride_side + layer * stride_layer + head * stride_head
    base += tl.load(slots_ptr + sequence) * stride_slot + tl.load(lengths_ptr + sequence) * stride_row
    path_ptr += sequence * nodes
    column = tl.arange(0, DIM)
    inside = column < dim
    for k in range(0, count, 4):
        row0, moved0 = _read(base, path_ptr, k, count, stride_row, column, stride_dim, inside)
        row1, moved1 = _read(base, path_ptr, k + 1, count, stride_row, column, stride_dim, inside)
        row2, moved2 = _read(base, path_ptr, k + 2, count, stride_row, column, stride_dim, inside)
        row3, moved3 = _read(base, path_ptr, k + 3, count, stride_row, column, stride_dim, inside)
        to = base + k * stride_row + column * stride_dim
        tl.store(to, row0, mask=moved0)
        tl.store(to + stride_row, row1, mask=moved1)
        tl.store(to + 2 * stride_row, row2, mask=moved2)
        tl.store(to + 3 * stride_row, row3, mask=moved3)


def compact_triton(cache: Tensor, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """`kernels.compact.compact`."""
    sides, layers, _, heads, _, dim = cache.shape
    slots, lengths, path, count = (t.contiguous() for t in (slots, lengths, path, count))
    _compact_kernel[(slots.numel(), heads, sides * layers)](
        cache,
        *cache.stride(),
        slots,
        lengths,
        path,
        count,
        layers,
        path.shape[1],
        dim,
        DIM=triton.next_power_of_2(dim),
        num_warps=1,
    )
