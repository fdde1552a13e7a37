"""A cycle run in a few padded batch sizes, on a GPU as a captured graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.decoding.device.cycle import Cycle
from stages.errors import EagleWarning


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    slots: Tensor
    record: Tensor


class PaddedCycle:
    """Runs a cycle for any batch, filled up with the spare slot to one of a few sizes."""

    def __init__(self, cycle: Cycle, most: int, pool: Any = None) -> None:
        """Args:
        most: sequences of a batch.
        pool: memory that graphs share, as they are never replayed at the same time.
        """
        self.cycle = cycle
        self.sizes = batch_sizes(most)
        self._captures = cycle.cache.data.is_cuda
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        self._storage: tuple[int, ...] = ()
        self._pool = pool

    def __call__(self, slots: Sequence[int], *, filtered: bool) -> Tensor:
        """The record of the sequences in these slots, int64 [padded B, columns]; overwritten by the next call
        of the same size, so that it must be copied before, in the order of the GPU's stream."""
        size = self.size(len(slots))
        numbers = torch.tensor([*slots, *[self.cycle.state.spare] * (size - len(slots))])
        device = self.cycle.cache.data.device
        if device.type == "cpu":
            return self.cycle.run(numbers, filtered=filtered)
        captured = self._captured(size, filtered) if self._captures else None
        if captured is None:
            return self.cycle.run(numbers.pin_memory().to(device, non_blocking=True), filtered=filtered)
        captured.slots.copy_(numbers.pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.record

    def size(self, batch: int) -> int:
        """To what a batch is filled up."""
        return next(size for size in self.sizes if size >= batch)

    def prepare(self, size: int, *, filtered: bool) -> None:
        """Capture the graph of a padded size, if there is none."""
        if self._captures:
            self._captured(size, filtered)

    def _captured(self, size: int, filtered: bool) -> _Captured | None:
        if self._storage != self.cycle.storage():  # a cache has grown: the graphs point where it was
            torch.cuda.synchronize()
            self._graphs.clear()
            self._storage = self.cycle.storage()
        if (size, filtered) not in self._graphs:
            slots = torch.full((size,), self.cycle.state.spare, device=self.cycle.cache.data.device)
            try:
                self._graphs[size, filtered] = self._capture(
                    slots, lambda: self.cycle.run(slots, filtered=filtered)
                )
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:200]
                warnings.warn(
                    f"cycles are launched step by step, as this target cannot be captured: {reason}",
                    EagleWarning,
                    stacklevel=2,
                )
                self._captures = False
                return None
        return self._graphs[size, filtered]

    def _capture(self, slots: Tensor, run: Callable[[], Tensor]) -> _Captured:
        """Nothing of a sequence is touched: all slots are the spare one."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels, and lets libraries allocate what they keep
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            record = run()
        return _Captured(graph, slots, record)


def batch_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every eighth; the last is ``most``."""
    sizes = [size for size in (1, 2, 4, *range(8, most, 8)) if size < most]
    return (*sizes, most)
