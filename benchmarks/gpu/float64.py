"""What attention and noise are, in float64 and without the kernels' tricks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gpu import DEVICE
from kernels import philox4x32
from kernels.noise import BELOW_ONE


def path_to_root(tree: Sequence[int], node: int) -> list[int]:
    """The node, its parent, and so on."""
    path = [node]
    while tree[path[-1]] >= 0:
        path.append(tree[path[-1]])
    return path


def attention64(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Sequence[int],
    lengths: Sequence[int],
    trees: Sequence[Sequence[int]],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Sequence by sequence, with masks made by walking from each node to the root: float64 [B, Hq, N, D]."""
    out = torch.zeros(query.shape, dtype=torch.float64, device=DEVICE)
    group = query.shape[1] // keys.shape[1]
    for b, (slot, length, tree) in enumerate(zip(slots, lengths, trees, strict=True)):
        size = length + len(tree)
        seen = torch.zeros(len(tree), size, dtype=torch.bool)
        for i, parent in enumerate(tree):
            if parent == -2:
                continue
            path = path_to_root(tree, i)
            first = 0 if window is None else max(0, length + len(path) - window)
            seen[i, first:length] = True
            seen[i, [length + j for j in path[: window or len(path)]]] = True
        k = keys[slot, :, :size].double().repeat_interleave(group, 0)  # [Hq, size, D]
        v = values[slot, :, :size].double().repeat_interleave(group, 0)
        scores = query[b].double() @ k.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen.to(DEVICE), -math.inf).softmax(-1)
        out[b] = weights.nan_to_num(0.0) @ v
    return out


def gumbel64(seed: Tensor, sample: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Noise of every token, of the fp32 number v that `kernels.noise` makes of a word: float64 [R, vocab] of
    int64 [R] keys."""
    counter = torch.arange(-(-vocab // 4), device=DEVICE)[None]
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    words = philox4x32(
        counter, position[:, None], sample[:, None], torch.zeros_like(counter), low[:, None], high[:, None]
    )
    word = torch.stack(words, -1).flatten(1)[:, :vocab].to(torch.float32)
    v = ((word + 0.5) * 2.0**-32).clamp(max=BELOW_ONE).double()
    return -torch.log(-torch.log1p(-v))
