"""The rows of one pass of a drafter over several sequences, and their attention to the drafter's own
cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.decoding.row_tensors import Place, row_tensors
from stages.targets import SlotCache


@dataclass(frozen=True)
class Run:
    """The rows of one sequence: ``begin`` to ``end`` of the pass.

    length: rows of its stable prefix.
    words: ancestor words over the rows behind the prefix (bit j: row length + j is seen); None for verified
        tokens, which become the prefix: each sees those before it.
    offset: drafted rows that earlier passes of this cycle have stored.
    """

    slot: int
    begin: int
    end: int
    length: int
    words: tuple[int, ...] | None = None
    offset: int = 0

    @property
    def size(self) -> int:
        """Rows of the slot when this pass has stored its own."""
        return self.length + self.offset + self.end - self.begin

    def places(self) -> list[Place]:
        """See `DraftRows.places`."""
        rows = range(self.length + self.offset, self.size)
        if self.words is None:
            return [(self.slot, row, row, 1) for row in rows]
        return [(self.slot, row, self.length, word) for row, word in zip(rows, self.words, strict=True)]


@dataclass(frozen=True)
class DraftRows:
    """The rows of a pass over M of them: where each is stored, and what it sees.

    tokens, positions: int64 [M].
    places: int64 [M, 4]: slot, cache row, rows of the prefix it sees, and its ancestor word (bit j: it sees
        row prefix + j too, itself among them).
    compiled: whether the CPU ops of ``kernels.cpu`` are loaded and know this cache.
    """

    cache: SlotCache
    runs: tuple[Run, ...]
    tokens: Tensor
    positions: Tensor
    places: Tensor
    compiled: bool

    @classmethod
    def of(
        cls, cache: SlotCache, runs: Sequence[Run], tokens: Sequence[int], positions: Sequence[int]
    ) -> DraftRows:
        """Makes room in the cache for what the runs store."""
        cache.reserve(max(run.size for run in runs))
        places = [place for run in runs for place in run.places()]
        tensors = row_tensors(tokens, positions, places, cache.data.device)
        return cls(cache, tuple(runs), *tensors, _has_ops(cache.data))

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Store keys and values [M, Hkv, D], and attend from query [M, Hq, D]: the same shape.

        window: positions that a row looks back at, itself included.
        """
        if self.compiled:
            flat = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            out = torch.ops.eagle_cpu.attend(
                *flat, self.places, self.cache.where, layer, scale, window or 0, 0.0
            )
            return out[0]
        keys, values = self.cache.data[0, layer], self.cache.data[1, layer]
        slots, rows = self.places[:, 0], self.places[:, 1]
        keys[slots, :, rows] = key
        values[slots, :, rows] = value
        return torch.cat([self._attend_run(run, query, keys, values, scale, window) for run in self.runs])

    def _attend_run(
        self, run: Run, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None
    ) -> Tensor:
        own, size = query[run.begin : run.end], run.size
        n, heads, dim = own.shape
        kv_heads = keys.shape[1]
        mask = _visible(self.places[run.begin : run.end], size, window)
        # The heads of a group share their keys: packed as extra rows, they read them once.
        packed = own.transpose(0, 1).reshape(kv_heads, heads // kv_heads * n, dim)
        out = F.scaled_dot_product_attention(
            packed[None],
            keys[None, run.slot, :, :size],
            values[None, run.slot, :, :size],
            attn_mask=mask.repeat(heads // kv_heads, 1),
            scale=scale,
        )
        return out[0].reshape(heads, n, dim).transpose(0, 1)


def _has_ops(cache: Tensor) -> bool:
    known = cache.device.type == "cpu" and cache.dtype in (torch.float32, torch.bfloat16)
    return known and hasattr(torch.ops.eagle_cpu, "attend")


def _visible(places: Tensor, size: int, window: int | None) -> Tensor:
    """bool [M, size]: the cache rows that each row sees."""
    prefix, words = places[:, 2:3], places[:, 3:4]
    behind = torch.arange(size, device=places.device) - prefix  # [M, size]; negative in the prefix
    bits = (words >> torch.arange(64, device=places.device)) & 1  # [M, 64]
    levels = bits.flip(-1).cumsum(-1).flip(-1)  # from bit j on: levels from there down to the row, and one
    node = behind.clamp(0, 63)
    seen = (behind < 64) & bits.gather(1, node).bool()
    if window is None:
        return (behind < 0) | ((behind >= 0) & seen)
    near = (behind >= 0) & seen & (levels.gather(1, node) <= window)
    return near | ((behind < 0) & (levels[:, :1] - 1 - behind < window))
