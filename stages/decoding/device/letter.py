"""What a cycle has found, on its way to the host."""

from __future__ import annotations

import time

import torch
from torch import Tensor

POISON = -(2**40)
"""Stands where nothing may be read; no number of a record is so low."""


class Moment:
    """Now; on a GPU when its queue has come to this point."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until it has come."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Moment) -> float:
        """Seconds between two moments that have both come."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._time - earlier._time


class Letter:
    """A record that is copied while the host does something else, and that is read once."""

    def __init__(self, record: Tensor, begun: Moment | None = None) -> None:
        """Queues the copy of ``record`` int64 [B, columns], behind what makes it.

        Args:
            begun: when that was begun.
        """
        on_gpu = record.is_cuda
        self._begun = begun
        self._content = torch.full(record.shape, POISON, dtype=torch.int64, pin_memory=on_gpu)
        self._content.copy_(record, non_blocking=True)
        self._arrival = Moment(on_gpu=on_gpu)

    def read(self) -> list[list[int]]:
        """Wait for the copy; the rows of the record.

        Raises:
            RuntimeError: it was read before, or has not been written.
        """
        self._arrival.wait()
        rows = self._content.tolist()
        self._content.fill_(POISON)
        if any(number == POISON for row in rows for number in row):
            raise RuntimeError("a cycle's record was read twice, or before it was there")
        return rows

    @property
    def seconds(self) -> float:
        """What the record has taken to make, once it was read."""
        return self._arrival.since(self._begun) if self._begun is not None else 0.0
