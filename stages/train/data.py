"""The rows to learn from: which are held out, and in what order the others come."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from stages.features.index import RowIndex, ShardIndex

Batch = tuple[RowIndex, ...]

HOLDOUT_BYTES = 1 << 30
"""Most features to hold out: they stay in memory, as otherwise each evaluation would read everything."""


@dataclass(frozen=True)
class Window:
    """Batches of rows of a few shards, which are open together."""

    batches: tuple[Batch, ...]

    @property
    def shards(self) -> tuple[int, ...]:
        """In the order in which they are first needed."""
        return tuple(dict.fromkeys(row.shard for batch in self.batches for row in batch))


@dataclass(frozen=True)
class TrainingPlan:
    """Which rows each optimizer step takes: windows of batches of rows, over all epochs."""

    windows: tuple[Window, ...]
    epoch_ends: tuple[int, ...]  # steps done when each epoch is

    @property
    def steps(self) -> int:
        """Optimizer steps, one a batch."""
        return sum(len(window.batches) for window in self.windows)

    @property
    def tokens(self) -> int:
        """Supervised tokens, those of each epoch counted."""
        return sum(row.supervised for window in self.windows for batch in window.batches for row in batch)

    def first(self, steps: int | None) -> TrainingPlan:
        """The plan that ends after so many steps, at the latest; None for all."""
        if steps is None or steps >= self.steps:
            return self
        ends = tuple(end for end in self.epoch_ends if end <= steps)
        return TrainingPlan(_cut(self.windows, 0, steps), ends)

    def after(self, steps: int) -> tuple[Window, ...]:
        """What is left of the windows once so many steps are done."""
        return _cut(self.windows, steps, self.steps)


def most_held_out(shards: Sequence[ShardIndex]) -> float:
    """How many tokens may be held out."""
    size = sum(shard.bytes for shard in shards)
    return HOLDOUT_BYTES * sum(row.tokens for shard in shards for row in shard.rows) / max(size, 1)


def hold_out(
    rows: Sequence[RowIndex], share: float, seed: int, most_tokens: float = float("inf")
) -> tuple[list[RowIndex], list[RowIndex]]:
    """Splits rows into those to train on and those held out, whole conversations, by a hash of seed and id.

    Holds out at least one conversation if `share` is above 0, never the only one, and no more beside the
    first than have `most_tokens` tokens in all.
    """
    tokens: dict[int, int] = {}
    for row in rows:
        tokens[row.row_id] = tokens.get(row.row_id, 0) + row.tokens
    ranked = sorted(tokens, key=lambda row_id: _hash(seed, row_id))
    number = min(max(round(share * len(ranked)), 1 if share > 0 else 0), len(ranked) - 1)
    held: set[int] = set()
    room = most_tokens
    for row_id in ranked[:number]:
        room -= tokens[row_id]
        if held and room < 0:
            break
        held.add(row_id)
    return [row for row in rows if row.row_id not in held], [row for row in rows if row.row_id in held]


def plan_training(
    rows: Sequence[RowIndex],
    sizes: Sequence[int],
    batch_tokens: int,
    epochs: int,
    seed: int,
    window_bytes: int,
) -> TrainingPlan:
    """The order of rows in training; a function of its arguments.

    In each epoch shards come in random order; those of a window are shuffled together, row by row, and its
    batches have about `batch_tokens` supervised positions each.

    Args:
        sizes: bytes of each shard.
        window_bytes: of the shards of a window in all, unless a single one has more.
    """
    windows: list[Window] = []
    ends: list[int] = []
    for epoch in range(epochs):
        order = random.Random(f"{seed} {epoch}")
        for window in _windows(rows, sizes, window_bytes, order):
            order.shuffle(window)
            windows.append(Window(split_batches(window, batch_tokens)))
        ends.append(sum(len(window.batches) for window in windows))
    return TrainingPlan(tuple(windows), tuple(ends))


def split_batches(rows: Sequence[RowIndex], batch_tokens: int) -> tuple[Batch, ...]:
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


def share_out(batch: Batch, ranks: int, micro_tokens: int | None) -> list[list[Batch]]:
    """The rows of one optimizer step as micro-batches of each process, a function of its arguments.

    Each process gets about the same supervision, none where there are fewer rows than processes, and cuts it
    into micro-batches of about `micro_tokens` supervised positions at most; None for one.
    """
    shares = _even(batch, ranks)
    if micro_tokens is None:
        return [[share] if share else [] for share in shares]
    return [
        [part for part in _even(share, math.ceil(_supervised(share) / micro_tokens)) if part]
        for share in shares
    ]


def _even(rows: Batch, parts: int) -> list[Batch]:
    """Parts of about equal supervision: row after row, the largest first, goes to the least."""
    members: list[list[RowIndex]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for row in sorted(rows, key=lambda row: row.supervised, reverse=True):
        least = sizes.index(min(sizes))
        members[least].append(row)
        sizes[least] += row.supervised
    return [tuple(part) for part in members]


def _supervised(rows: Batch) -> int:
    return sum(row.supervised for row in rows)


def _windows(
    rows: Sequence[RowIndex], sizes: Sequence[int], window_bytes: int, order: random.Random
) -> list[list[RowIndex]]:
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
            room = window_bytes
        windows[-1] += by_shard[shard]
        room -= sizes[shard]
    return windows


def _cut(windows: Sequence[Window], start: int, stop: int) -> tuple[Window, ...]:
    """Batches `start` to `stop`, counted over all windows."""
    cut, first = [], 0
    for window in windows:
        batches = window.batches[max(start - first, 0) : max(stop - first, 0)]
        if batches:
            cut.append(Window(batches))
        first += len(window.batches)
    return tuple(cut)


def _hash(seed: int, row_id: int) -> bytes:
    return hashlib.sha256(f"{seed} {row_id}".encode()).digest()
