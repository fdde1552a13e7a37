"""Move the accepted path's KV rows down to a dense prefix.

    cache[:, :, slot, :, length + k] = cache[:, :, slot, :, length + path[k]]     for k = 0 .. count-1

Path indices rise strictly, so path[k] >= k and a row never moves up: source and destination may overlap, and
moving in order never overwrites a row still to be read.

Cost a sequence: up to 4 * L * Hkv * (count - 1) * D elements moved (read and written, keys and values); none
when the path is the tree's first nodes, as in a chain.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu import ops_loaded
from kernels.dispatch import use_triton


def compact(cache: Tensor, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """Compact, in place.

    Args:
        cache: [2, L, slots, Hkv, S, D], keys then values, any strides.
        slots: int64 [B], distinct.
        lengths: int64 [B], rows of each stable prefix before acceptance.
        path: int64 [B, N], accepted node indices, strictly rising; entries from count on are ignored.
        count: int64 [B].
    """
    if use_triton(cache):
        from kernels.compact_triton import compact_triton

        compact_triton(cache, slots, lengths, path, count)
    elif cache.device.type == "cpu" and cache.stride(-1) == 1 and ops_loaded():
        counts = count.tolist()
        paths = [node for nodes, kept in zip(path.tolist(), counts, strict=True) for node in nodes[:kept]]
        torch.ops.eagle_cpu.compact(cache, slots.tolist(), lengths.tolist(), counts, paths)
    else:
        compact_torch(cache, slots, lengths, path, count)


def compact_paths(cache: Tensor, moved: Sequence[tuple[int, int, Sequence[int]]]) -> None:
    """`compact` for a host that knows what is accepted: the slot, length and path of each sequence."""
    if cache.device.type == "cpu" and cache.stride(-1) == 1 and ops_loaded():
        slots, lengths, paths = zip(*moved, strict=True)
        nodes = [node for path in paths for node in path]
        torch.ops.eagle_cpu.compact(cache, slots, lengths, [len(path) for path in paths], nodes)
        return
    longest = max(len(path) for _, _, path in moved)
    numbers = [
        [slot, length, len(path), *path, *[-1] * (longest - len(path))] for slot, length, path in moved
    ]
    whole = torch.tensor(numbers, device=cache.device)
    compact(cache, whole[:, 0], whole[:, 1], whole[:, 3:], whole[:, 2])


def compact_torch(cache: Tensor, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """`compact` in torch."""
    for slot, length, nodes, accepted in zip(
        slots.tolist(), lengths.tolist(), path.tolist(), count.tolist(), strict=True
    ):
        moved = [(k, node) for k, node in enumerate(nodes[:accepted]) if node != k]
        if not moved:
            continue
        rows = cache[:, :, slot]  # [2, L, Hkv, S, D]
        source = torch.tensor([length + node for _, node in moved], device=cache.device)
        start = length + moved[0][0]
        rows[:, :, :, start : start + len(moved)] = rows.index_select(3, source)
