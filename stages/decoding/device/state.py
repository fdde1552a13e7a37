"""What the device knows of every sequence: one row a slot, read and written by each cycle without the host.

The host writes a row when a sequence joins and never reads one: what a cycle has put out comes back in its
record. So a cycle can be launched before the host has seen what the one before it has found: its tokens,
lengths and states are here already (a future map).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import Filters
from stages.decoding.sampling import SamplingParams, signed

MOST_ENDS = 16
"""Ids that may end one output."""

GONE = -1
"""The last token of a sequence that has left."""

_ROOT, _LENGTH, _LEFT, _DRAFTS, _SEED, _SAMPLE, _TOP_K, _ENDS = range(8)


@dataclass(frozen=True)
class Entry:
    """A sequence as it joins, its prompt read and its first token drawn.

    root: its last token, which is in no cache yet.
    length: rows of its stable prefix, which is the root's position.
    left: tokens that it may still put out.
    drafts: whether anything is drafted for it.
    """

    root: int
    length: int
    left: int
    end_ids: frozenset[int]
    params: SamplingParams
    drafts: bool


@dataclass(frozen=True)
class Rows:
    """The rows of the slots of one cycle, B of them.

    slots, root, length, left: int64 [B]; a sequence that has ended has nothing left, and changes no more.
    drafts: bool [B].
    ends: int64 [B, MOST_ENDS], filled up with -1.
    temperature: fp32 [B]; seed, sample: int64 [B].
    """

    slots: Tensor
    root: Tensor
    length: Tensor
    left: Tensor
    drafts: Tensor
    ends: Tensor
    temperature: Tensor
    seed: Tensor
    sample: Tensor
    filters: Filters


class DeviceState:
    """The rows of all slots and of one spare slot, whose row has always ended."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.spare = slots
        self._integers = torch.zeros(slots + 1, _ENDS + MOST_ENDS, dtype=torch.int64, device=device)
        self._floats = torch.ones(
            slots + 1, 3, dtype=torch.float32, device=device
        )  # temperature, top-p, min-p
        self._floats[:, 0] = 0.0

    def put(self, slot: int, entry: Entry) -> None:
        """Write the row of a sequence that joins."""
        params = entry.params
        ends = sorted(entry.end_ids)
        integers = [
            entry.root,
            entry.length,
            entry.left,
            int(entry.drafts),
            signed(params.seed),
            params.sample,
            params.top_k,
            *ends,
            *[-1] * (MOST_ENDS - len(ends)),
        ]
        self._write(self._integers, slot, torch.tensor(integers))
        self._write(self._floats, slot, torch.tensor([params.temperature, params.top_p, params.min_p]))

    def poison(self, slot: int) -> None:
        """Have everyone see that the sequence of a row has left; a cycle that takes it all the same writes
        within its slot."""
        row = torch.zeros(self._integers.shape[1], dtype=torch.int64)
        row[_ROOT] = GONE
        self._write(self._integers, slot, row)

    def rows(self, slots: Tensor) -> Rows:
        """The rows of slots int64 [B]."""
        integers, floats = self._integers[slots], self._floats[slots]
        temperature, top_p, min_p = floats.unbind(1)
        return Rows(
            slots,
            integers[:, _ROOT],
            integers[:, _LENGTH],
            integers[:, _LEFT],
            integers[:, _DRAFTS] > 0,
            integers[:, _ENDS:],
            temperature,
            integers[:, _SEED],
            integers[:, _SAMPLE],
            Filters(integers[:, _TOP_K], top_p, min_p),
        )

    def advance(self, slots: Tensor, root: Tensor, length: Tensor, left: Tensor) -> None:
        """What a cycle leaves behind, int64 [B] each; the row of the spare slot stays as it is."""
        self._integers[slots, :3] = torch.stack((root, length, left), 1)

    @staticmethod
    def _write(table: Tensor, slot: int, row: Tensor) -> None:
        if table.is_cuda:
            row = row.pin_memory()  # so that the copy is queued and the host goes on
        table[slot].copy_(row, non_blocking=True)
