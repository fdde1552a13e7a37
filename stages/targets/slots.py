"""The static KV cache: one fixed-size slot a sequence, tree nodes written behind the stable prefix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import MAX_NODES, compact, tree_mask


class SlotCache:
    """Keys and values of ``slots`` sequences: ``data`` [2, layers, slots, Hkv, rows, D].

    Row r of a slot holds position r of its sequence; a tree's nodes lie behind the stable prefix until the
    accepted ones are moved up by ``keep``. Lengths belong to the caller: the cache only stores.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        rows: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.data = torch.zeros(2, layers, slots, kv_heads, rows, head_dim, dtype=dtype, device=device)

    @classmethod
    def for_model(
        cls, config: Any, *, slots: int, rows: int, dtype: torch.dtype, device: torch.device
    ) -> SlotCache:
        """A cache for a model of this transformers config; ``rows`` counts tokens a slot, tree nodes
        included."""
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            slots=slots,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            rows=rows,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
            device=device,
        )

    @property
    def slots(self) -> int:
        return self.data.shape[2]

    @property
    def rows(self) -> int:
        return self.data.shape[4]

    @torch.inference_mode()
    def reserve(self, rows: int) -> None:
        """Make every slot at least ``rows`` long and keep what is stored; grows by half at least."""
        if rows > self.rows:
            longer = -(-max(rows, self.rows * 3 // 2) // 128) * 128
            data = self.data.new_zeros(*self.data.shape[:4], longer, self.data.shape[5])
            data[:, :, :, :, : self.rows] = self.data
            self.data = data

    @torch.inference_mode()
    def keep(self, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
        """Make the accepted nodes part of the stable prefix; see ``kernels.compact``."""
        compact(self.data, slots, lengths, path, count)

    @torch.inference_mode()
    def move(self, source: int, destination: int, rows: int) -> None:
        """Copy the first ``rows`` rows of one slot over another's."""
        self.data[:, :, destination, :, :rows] = self.data[:, :, source, :, :rows]


@dataclass(frozen=True)
class SlotStep:
    """One forward over ``first .. first + B - 1`` slots of N new tokens each: where they are stored and
    what they see.

    cache: where keys and values are written and read.
    first: the first slot; the batch is a run of slots.
    lengths: int64 [B], rows of each stable prefix; token i of sequence b is stored in row
        lengths[b] + offset + i.
    ancestors: int64 [B, N] ancestor words of the tree, or None for a plain causal run of tokens.
    mask: bool [B, 1, N, size], the same as a dense mask.
    start: lengths[0] + offset as a number where B is 1 (writes are then one slice), else None.
    offset: rows of the tree stored by earlier steps of the same cycle.
    """

    cache: SlotCache
    first: int
    lengths: Tensor
    ancestors: Tensor | None
    mask: Tensor
    start: int | None
    offset: int = 0

    @classmethod
    def tree(
        cls, cache: SlotCache, first: int, lengths: list[int], ancestors: Tensor, *, offset: int = 0
    ) -> SlotStep:
        """N <= 64 tree nodes a sequence, those from row ``offset`` of the tree on; ``ancestors`` int64 [B,
        N]."""
        at = torch.tensor(lengths, device=ancestors.device)
        size = max(lengths) + offset + ancestors.shape[1]
        start = lengths[0] + offset if len(lengths) == 1 else None
        return cls(cache, first, at, ancestors, tree_mask(at, ancestors, size), start, offset)

    @classmethod
    def causal(cls, cache: SlotCache, first: int, lengths: list[int], tokens: int) -> SlotStep:
        """``tokens`` new tokens a sequence, each seeing the prefix and the new ones up to itself."""
        if tokens <= MAX_NODES:  # a chain is a tree, and few tokens go the way of trees
            return cls.tree(cache, first, lengths, _chain(tokens, cache.data.device).expand(len(lengths), -1))
        at = torch.tensor(lengths, device=cache.data.device)
        rows = torch.arange(max(lengths) + tokens, device=at.device)
        last = at[:, None] + torch.arange(tokens, device=at.device)  # [B, N] own row
        mask = (rows <= last[..., None]).unsqueeze(1)
        return cls(cache, first, at, None, mask, lengths[0] if len(lengths) == 1 else None)

    @property
    def slots(self) -> slice:
        return slice(self.first, self.first + self.mask.shape[0])

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, Hkv, N, D] keys and values of one layer; returns that layer's whole caches [slots,
        Hkv, S, D]."""
        key_cache, value_cache = self.cache.data[0, layer], self.cache.data[1, layer]
        nodes = keys.shape[2]
        if self.start is not None:
            key_cache[self.first, :, self.start : self.start + nodes] = keys[0]
            value_cache[self.first, :, self.start : self.start + nodes] = values[0]
        else:
            rows = self.lengths[:, None] + self.offset + torch.arange(nodes, device=keys.device)
            slots = torch.arange(self.first, self.first + keys.shape[0], device=keys.device)[:, None]
            key_cache[slots, :, rows] = keys.transpose(1, 2)
            value_cache[slots, :, rows] = values.transpose(1, 2)
        return key_cache, value_cache


def _chain(tokens: int, device: torch.device) -> Tensor:
    """Ancestor words of a chain, int64 [1, tokens]: bits 0 .. i for node i."""
    full = MAX_NODES - 1  # the word of all 64 bits is -1 in int64
    return torch.tensor([[-1 if i == full else (1 << (i + 1)) - 1 for i in range(tokens)]], device=device)
