"""Triton kernel of `kernels.compact`: the formula and its cost are there.

One program a (sequence, layer and side, head) moves its rows one after another. A thread holds the same
elements of every row, so a row is read by the thread that later overwrites it, in program order: no barrier
is needed.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


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
    """Grid (B, 2 * L, Hkv)."""
    sequence = tl.program_id(0).to(tl.int64)
    side = (tl.program_id(1) // layers).to(tl.int64)
    layer = (tl.program_id(1) % layers).to(tl.int64)
    head = tl.program_id(2).to(tl.int64)
    base = cache_ptr + side * stride_side + layer * stride_layer + head * stride_head
    base += tl.load(slots_ptr + sequence) * stride_slot + tl.load(lengths_ptr + sequence) * stride_row
    column = tl.arange(0, DIM)
    count = tl.load(count_ptr + sequence)
    for k in range(count):
        node = tl.load(path_ptr + sequence * nodes + k)
        if node != k:
            row = tl.load(base + node * stride_row + column * stride_dim, mask=column < dim)
            tl.store(base + k * stride_row + column * stride_dim, row, mask=column < dim)


def compact_triton(cache: Tensor, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """`kernels.compact.compact`."""
    sides, layers, _, heads, _, dim = cache.shape
    slots, lengths, path, count = (t.contiguous() for t in (slots, lengths, path, count))
    _compact_kernel[(slots.numel(), sides * layers, heads)](
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
