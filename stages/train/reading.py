"""The rows of the planned batches, from shards of which one window's are open at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from torch import Tensor

from stages.features.index import RowIndex
from stages.features.layout import FeatureRow
from stages.features.source import FeatureSource
from stages.train.data import Batch, Window


class HeldOutRows:
    """Rows that are not trained on: in memory from the first time that their shard is open.

    Attributes:
        waited: seconds spent on opening shards for the sake of these rows.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.waited = 0.0
        self._batches = batches
        self._wanted: dict[int, list[RowIndex]] = {}
        for row in chain.from_iterable(batches):
            self._wanted.setdefault(row.shard, []).append(row)
        self._kept: dict[int, dict[RowIndex, FeatureRow]] = {}

    def keep(self, number: int, rows: Sequence[FeatureRow]) -> None:
        """Copies what is held out of `rows`, all those of shard `number`."""
        if number in self._wanted and number not in self._kept:
            self._kept[number] = {index: _copied(rows[index.row]) for index in self._wanted[number]}

    def batches(self, source: FeatureSource) -> Iterator[list[FeatureRow]]:
        """All of them, in order; opens the shards that have not been open, one after the other, before."""
        began = time.monotonic()
        missing = [number for number in self._wanted if number not in self._kept]
        if missing:
            source.prefetch(missing)
        for number in missing:
            with source.open(number) as rows:
                self.keep(number, rows)
        self.waited += time.monotonic() - began
        for batch in self._batches:
            yield [self._kept[index.shard][index] for index in batch]


class OpenShards:
    """The shards of a source that are open now."""

    def __init__(self, source: FeatureSource) -> None:
        self._source = source
        self._rows: dict[int, Sequence[FeatureRow]] = {}
        self._opened: dict[int, ExitStack] = {}

    def change(self, numbers: Sequence[int], held_out: HeldOutRows) -> None:
        """Closes all others first, then opens those of `numbers` that are not open."""
        self.close(keep=numbers)
        self.fetch(numbers)
        for number in numbers:
            if number not in self._rows:
                opened = self._opened[number] = ExitStack()
                self._rows[number] = opened.enter_context(self._source.open(number))
                held_out.keep(number, self._rows[number])

    def fetch(self, numbers: Sequence[int]) -> None:
        """Those that are not open will be soon."""
        missing = [number for number in numbers if number not in self._rows]
        if missing:
            self._source.prefetch(missing)

    def row(self, index: RowIndex) -> FeatureRow:
        return self._rows[index.shard][index.row]

    def close(self, keep: Collection[int] = ()) -> None:
        for number in self._opened.keys() - set(keep):
            self._rows.pop(number, None)
            self._opened.pop(number).close()


def read_steps(
    source: FeatureSource,
    windows: Sequence[Window],
    held_out: HeldOutRows,
    share: Callable[[Batch], Sequence[Batch]] = lambda batch: [batch],
) -> Generator[list[list[FeatureRow]], None, None]:
    """The rows of each optimizer step, as `share` divides them into micro-batches, valid until the next step
    is asked for.

    While a window's batches are taken, the shards of the window after it are fetched.
    """
    shards = OpenShards(source)
    try:
        for position, window in enumerate(windows):
            shards.change(window.shards, held_out)
            for following in windows[position + 1 : position + 2]:
                shards.fetch(following.shards)
            for batch in window.batches:
                yield [[shards.row(index) for index in micro] for micro in share(batch)]
    finally:
        shards.close()


def _copied(row: FeatureRow) -> FeatureRow:
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    copies: dict[str, Any] = {
        name: value.clone() for name, value in values.items() if isinstance(value, Tensor)
    }
    return replace(row, **copies)
