"""The rows to learn from: which are held out, what their labels are, and in what order they come."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path

import torch
from torch import Tensor

from stages.artifacts import Artifact
from stages.errors import EagleError
from stages.features.layout import FeatureRow, FeatureShard, supervised_positions

WINDOW_BYTES = 8 << 30
"""Shards of this size in all are shuffled together, and mapped at a time."""


@dataclass(frozen=True)
class RowIndex:
    """Where a row is, and how much it teaches."""

    shard: int
    row: int  # in the shard
    row_id: int  # of the conversation
    supervised: int  # positions


Window = tuple[tuple[RowIndex, ...], ...]
"""Batches of rows of a few shards, which are open together."""


@dataclass(frozen=True)
class FeatureRows:
    """The rows of a features artifact: an index in memory, and shards that are mapped when needed."""

    paths: tuple[Path, ...]
    sizes: tuple[int, ...]  # bytes of each shard
    rows: tuple[RowIndex, ...]

    @classmethod
    def of(cls, artifact: Artifact) -> FeatureRows:
        """Reads masks and lengths of all shards.

        Raises:
            EagleError: a shard is damaged, or no row has a supervised position.
        """
        paths = tuple(artifact.local(shard.path) for shard in artifact.manifest.shards)
        rows: list[RowIndex] = []
        for number, path in enumerate(paths):
            shard = FeatureShard.from_file(path)
            positions = supervised_positions(shard.loss_mask, shard.row_offsets)
            supervised = torch.searchsorted(positions, shard.row_offsets).diff().tolist()
            rows += [
                RowIndex(number, r, row_id, count)
                for r, (row_id, count) in enumerate(zip(shard.row_ids.tolist(), supervised, strict=True))
                if count > 0
            ]
        if not rows:
            raise EagleError(
                f"{artifact.uri} has no supervised position, every loss mask is zero: make the conversations "
                "again with eagle gen-data, and features from them"
            )
        return cls(paths, tuple(shard.bytes for shard in artifact.manifest.shards), tuple(rows))

    def label_counts(self, rows: Iterable[RowIndex], vocab_size: int) -> Tensor:
        """int64 [V]: how often each token is the label of a supervised position of these rows."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for number, members in groupby(rows, lambda row: row.shard):
            content = self._open(number)
            labels = [content[row.row].input_ids[content[row.row].supervised + 1] for row in members]
            counts += torch.bincount(torch.cat(labels).long(), minlength=vocab_size)
        return counts

    def batches(self, windows: Iterable[Window], skip: int = 0) -> Iterator[list[FeatureRow]]:
        """The batches of windows, behind the first `skip`; one window's shards are open at a time."""
        for window in windows:
            if skip < len(window):
                shards = {
                    number: self._open(number) for number in {row.shard for batch in window for row in batch}
                }
                for batch in window[skip:]:
                    yield [shards[row.shard][row.row] for row in batch]
            skip = max(0, skip - len(window))

    def _open(self, number: int) -> list[FeatureRow]:
        """The rows of a shard; their content is read from the disk when it is used."""
        return list(FeatureShard.from_file(self.paths[number]).rows())


@dataclass(frozen=True)
class TrainingPlan:
    """Which rows each optimizer step takes: windows of batches of rows, over all epochs."""

    windows: tuple[Window, ...]
    epoch_ends: tuple[int, ...]  # steps done when each epoch is

    @property
    def steps(self) -> int:
        """Optimizer steps, one a batch."""
        return self.epoch_ends[-1]

    def tokens(self, steps: int) -> int:
        """Supervised tokens of the first `steps` batches."""
        batches = islice((batch for window in self.windows for batch in window), steps)
        return sum(row.supervised for batch in batches for row in batch)


def hold_out(rows: Sequence[RowIndex], share: float, seed: int) -> tuple[list[RowIndex], list[RowIndex]]:
    """Splits rows into those to train on and those held out, whole conversations, by a hash of seed and id.

    Holds out at least one conversation if `share` is above 0, and never the only one.
    """
    ranked = sorted({row.row_id for row in rows}, key=lambda row_id: _hash(seed, row_id))
    number = min(max(round(share * len(ranked)), 1 if share > 0 else 0), len(ranked) - 1)
    held = set(ranked[:number])
    return [row for row in rows if row.row_id not in held], [row for row in rows if row.row_id in held]


def plan_training(
    rows: Sequence[RowIndex], sizes: Sequence[int], batch_tokens: int, epochs: int, seed: int
) -> TrainingPlan:
    """The order of rows in training; a function of its arguments.

    In each epoch shards come in random order; those of a window are shuffled together, row by row, and its
    batches have about `batch_tokens` supervised positions each.

    Args:
        sizes: bytes of each shard.
    """
    windows: list[Window] = []
    ends: list[int] = []
    for epoch in range(epochs):
        order = random.Random(f"{seed} {epoch}")
        for window in _windows(rows, sizes, order):
            order.shuffle(window)
            windows.append(split_batches(window, batch_tokens))
        ends.append(sum(map(len, windows)))
    return TrainingPlan(tuple(windows), tuple(ends))


def split_batches(rows: Sequence[RowIndex], batch_tokens: int) -> Window:
    """Cuts rows, in order, into batches of about equal supervision, as near to `batch_tokens` as may be."""
    total = sum(row.supervised for row in rows)
    number = max(1, round(total / batch_tokens))
    batches: list[list[RowIndex]] = [[] for _ in range(number)]
    before = 0
    for row in rows:
        middle = before + row.supervised / 2  # a row goes where most of it belongs
        batches[int(middle * number / total)].append(row)
        before += row.supervised
    return tuple(tuple(batch) for batch in batches if batch)


def _windows(rows: Sequence[RowIndex], sizes: Sequence[int], order: random.Random) -> list[list[RowIndex]]:
    by_shard: dict[int, list[RowIndex]] = {}
    for row in rows:
        by_shard.setdefault(row.shard, []).append(row)
    shards = list(by_shard)
    order.shuffle(shards)
    windows: list[list[RowIndex]] = []
    room = 0
    for shard in shards:
        if not windows or sizes[shard] > room:
            windows.append([])
            room = WINDOW_BYTES
        windows[-1] += by_shard[shard]
        room -= sizes[shard]
    return windows


def _hash(seed: int, row_id: int) -> bytes:
    return hashlib.sha256(f"{seed} {row_id}".encode()).digest()
