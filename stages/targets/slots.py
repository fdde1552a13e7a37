"""The static KV cache: one fixed-size slot a sequence, tree nodes written behind the stable prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import MAX_NODES, compact, compact_paths, tree_mask
from stages.targets.inference import inference

ROWS = 128
"""Slots are as long as a multiple of this."""


class SlotCache:
    """Keys and values of ``slots`` sequences: ``data`` [2, layers, slots, Hkv, rows, D].

    Row r of a slot, of ``rows``, holds position r of its sequence; a tree's nodes lie behind the stable
    prefix until the accepted ones are moved up by ``keep``. Lengths belong to the caller: the cache only
    stores.
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
        spare: int = 0,
    ) -> None:
        """``spare``: slots behind the others, not counted among them, for what nobody reads."""
        self.slots, self.rows = slots, rows
        self.data = torch.zeros(
            2, layers, slots + spare, kv_heads, rows, head_dim, dtype=dtype, device=device
        )
        self.where = _where(self.data)

    @classmethod
    def for_model(
        cls,
        config: Any,
        *,
        slots: int,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        spare: int = 0,
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
            spare=spare,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one more row in every slot."""
        return self.data[:, :, :, :, 0].numel() * self.data.element_size()

    def reserve(self, rows: int) -> None:
        """Make every slot at least ``rows`` long and keep what is stored; grows by half at least."""
        if rows > self.rows:
            self._lengthen(-(-max(rows, self.rows * 3 // 2) // ROWS) * ROWS)

    @inference
    def _lengthen(self, rows: int) -> None:
        data = self.data.new_zeros(*self.data.shape[:4], rows, self.data.shape[5])
        data[:, :, :, :, : self.rows] = self.data
        self.data, self.rows = data, rows
        self.where.copy_(_where(data))  # in place: a compiled forward may hold it

    @inference
    def keep(self, slots: Tensor, lengths: Tensor, path: Tensor, count: Tensor) -> None:
        """Make the accepted nodes part of the stable prefix; see ``kernels.compact``."""
        compact(self.data, slots, lengths, path, count)

    @inference
    def keep_paths(self, moved: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """The same of a slot, its stable prefix and its accepted path each."""
        compact_paths(self.data, moved)

    @inference
    def copy(self, source: int, destination: int, rows: int) -> None:
        """Copy the first ``rows`` rows of one slot over another's."""
        self.data[:, :, destination, :, :rows] = self.data[:, :, source, :, :rows]


def _where(data: Tensor) -> Tensor:
    """What the CPU ops know of a cache, int64 [5]: see ``kernels.cpu``."""
    keys, values = data[0].data_ptr(), data[1].data_ptr()
    return torch.tensor([keys, values, *data.stride()[1:4]])


class RowStep(NamedTuple):
    """Where each row of a forward over rows [1, M] of any sequences is stored, and what it sees; for CPU ops.

    places: int64 [M, 4], slot, row, stable prefix and ancestor word; see ``kernels.cpu``.
    where: ``SlotCache.where``.
    """

    places: Tensor
    where: Tensor


@dataclass(frozen=True)
class SlotStep:
    """One forward over B slots of N new tokens each: where they are stored and what they see.

    cache: where keys and values are written and read.
    slots: a run of B slots as a slice, or any as int64 [B].
    lengths: int64 [B], rows of each stable prefix; token i of sequence b is stored in row
        lengths[b] + offset + i.
    nodes: N.
    size: rows of a slot that some token sees, at most.
    ancestors: int64 [B, N] ancestor words of the tree, or None for a plain causal run of tokens.
    start: lengths[0] + offset as a number where B is 1 and the host knows it (writes are then one slice),
        else None.
    offset: rows of the tree stored by earlier steps of the same cycle.
    """

    cache: SlotCache
    slots: slice | Tensor
    lengths: Tensor
    nodes: int
    size: int
    ancestors: Tensor | None
    start: int | None
    offset: int = 0

    @classmethod
    def tree(
        cls,
        cache: SlotCache,
        slots: int | Sequence[int],
        lengths: list[int],
        ancestors: Tensor,
        *,
        offset: int = 0,
    ) -> SlotStep:
        """N <= 64 tree nodes a sequence, those from row ``offset`` of the tree on.

        Args:
            slots: of each sequence, or the first one of a run.
            ancestors: int64 [B, N].
        """
        at = torch.tensor(lengths, device=ancestors.device)
        nodes = ancestors.shape[1]
        start = lengths[0] + offset if len(lengths) == 1 else None
        where = _some(slots, len(lengths), ancestors.device)
        return cls(cache, where, at, nodes, max(lengths) + offset + nodes, ancestors, start, offset)

    @classmethod
    def static(
        cls, cache: SlotCache, slots: Tensor, lengths: Tensor, ancestors: Tensor, *, offset: int = 0
    ) -> SlotStep:
        """A tree in each of the slots, of which the host knows the shape alone: it covers all rows there
        are."""
        return cls(cache, slots, lengths, ancestors.shape[1], cache.rows, ancestors, None, offset)

    @classmethod
    def causal(cls, cache: SlotCache, first: int, lengths: list[int], tokens: int) -> SlotStep:
        """``tokens`` new tokens a sequence, each seeing the prefix and the new ones up to itself."""
        if tokens <= MAX_NODES:  # a chain is a tree, and few tokens go the way of trees
            return cls.tree(cache, first, lengths, _chain(tokens, cache.data.device).expand(len(lengths), -1))
        at = torch.tensor(lengths, device=cache.data.device)
        start = lengths[0] if len(lengths) == 1 else None
        where = _some(first, len(lengths), at.device)
        return cls(cache, where, at, tokens, max(lengths) + tokens, None, start)

    @property
    def batch(self) -> int:
        """Sequences, B."""
        return len(self.lengths)

    @property
    def numbers(self) -> Tensor:
        """int64 [B], the slots."""
        if isinstance(self.slots, slice):
            return torch.arange(self.slots.start, self.slots.stop, device=self.lengths.device)
        return self.slots

    @cached_property
    def mask(self) -> Tensor:
        """bool [B, 1, N, size]: what each token sees, as a dense mask."""
        if self.ancestors is not None:
            return tree_mask(self.lengths, self.ancestors, self.size)
        rows = torch.arange(self.size, device=self.lengths.device)
        last = self.lengths[:, None] + torch.arange(self.nodes, device=rows.device)  # [B, N] own row
        return (rows <= last[..., None]).unsqueeze(1)

    @property
    def places(self) -> Tensor:
        """int64 [B * N, 4], the same for ``RowStep``; row after row, sequence after sequence."""
        nodes = self.nodes
        slots = self.numbers[:, None].expand(-1, nodes)
        rows = self.lengths[:, None] + self.offset + torch.arange(nodes)
        if self.ancestors is None:
            prefix, words = rows, torch.ones_like(rows)
        else:
            prefix, words = self.lengths[:, None].expand(-1, nodes), self.ancestors
        return torch.stack((slots, rows, prefix, words), -1).flatten(0, 1)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, Hkv, N, D] keys and values of one layer; returns that layer's whole caches [slots,
        Hkv, S, D]."""
        key_cache, value_cache = self.cache.data[0, layer], self.cache.data[1, layer]
        nodes = keys.shape[2]
        if self.start is not None and isinstance(self.slots, slice):
            first = self.slots.start
            key_cache[first, :, self.start : self.start + nodes] = keys[0]
            value_cache[first, :, self.start : self.start + nodes] = values[0]
        else:
            rows = self.lengths[:, None] + self.offset + torch.arange(nodes, device=keys.device)
            slots = self.numbers[:, None]
            key_cache[slots, :, rows] = keys.transpose(1, 2)
            value_cache[slots, :, rows] = values.transpose(1, 2)
        return key_cache, value_cache


def _some(slots: int | Sequence[int], batch: int, device: torch.device) -> slice | Tensor:
    """The slots given, as a slice if they are a run."""
    if isinstance(slots, int):
        return slice(slots, slots + batch)
    if list(slots) == list(range(slots[0], slots[0] + batch)):
        return slice(slots[0], slots[0] + batch)
    return torch.tensor(slots, device=device)


def _chain(tokens: int, device: torch.device) -> Tensor:
    """Ancestor words of a chain, int64 [1, tokens]: bits 0 .. i for node i."""
    full = MAX_NODES - 1  # the word of all 64 bits is -1 in int64
    return torch.tensor([[-1 if i == full else (1 << (i + 1)) - 1 for i in range(tokens)]], device=device)
