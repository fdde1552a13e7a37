"""What to run in which order: how much of each conversation to keep, which ones share a forward pass, and
which passes a shard.

The plan depends on the conversations and the settings only, so a rerun makes the same batches and shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stages.features.config import LongRows
from stages.features.layout import ShardSizes
from stages.features.storage import StorageFormat
from stages.features.token_rows import TokenRow

WINDOW = 512  # conversations that are sorted by length together, and so held in memory at a time

Fate = Literal["whole", "clipped", "dropped", "skipped"]


@dataclass(frozen=True, slots=True)
class KeptRow:
    """What training needs of a conversation: its first `length` tokens, with `supervised` positions.

    Attributes:
        fate: "whole" up to its last label, "clipped" before that, or nothing of it: "dropped" as too long,
            "skipped" without a label.
    """

    length: int
    supervised: int
    fate: Fate


def keep(loss_mask: np.ndarray, max_length: int, long_rows: LongRows = "clip") -> KeptRow:
    """Ends a row behind its last label, as the tokens after it teach nothing, and within `max_length` tokens.

    A longer row ends with the last response that fits as a whole and has a label; if there is none, with the
    last label that fits.
    """
    if len(loss_mask) <= max_length:
        length, supervised = _taught(loss_mask)
        return KeptRow(length, supervised, "whole" if length else "skipped")
    if long_rows == "drop":
        return KeptRow(0, 0, "dropped")
    ends = np.flatnonzero(loss_mask[:max_length] > loss_mask[1 : max_length + 1]) + 1  # of whole responses
    length, supervised = _taught(loss_mask[: ends[-1]]) if len(ends) else (0, 0)
    if not length:
        length, supervised = _taught(loss_mask[:max_length])
    return KeptRow(length, supervised, "clipped" if length else "skipped")


def _taught(loss_mask: np.ndarray) -> tuple[int, int]:
    """Tokens up to the last label, and supervised positions (`layout.supervised_positions` says which)."""
    positions = np.flatnonzero(loss_mask[1:-1] & loss_mask[2:]) + 1
    return (int(positions[-1]) + 2, len(positions)) if len(positions) else (0, 0)


@dataclass(frozen=True)
class ShardPlan:
    """One shard: the numbers of its batches, and what they hold."""

    batches: range
    sizes: ShardSizes


@dataclass(frozen=True)
class Plan:
    """Which rows run together.

    Attributes:
        first: number of the conversation that `rows[0]` is.
        rows: one a conversation, in the artifact's order.
        batches: indices into `rows`; those of a batch are of one window of `WINDOW` conversations, windows in
            order.
        left_out: conversations behind `rows` that were not looked at, as there were tokens enough.
    """

    first: int
    rows: tuple[KeptRow, ...]
    batches: tuple[tuple[int, ...], ...]
    left_out: int = 0

    @property
    def kept_rows(self) -> int:
        return sum(row.length > 0 for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(row.length for row in self.rows)

    @property
    def supervised(self) -> int:
        return sum(row.supervised for row in self.rows)

    def counts(self) -> dict[str, int]:
        """What the manifest says of rows and tokens; those of parts add up."""
        fates = [row.fate for row in self.rows]
        return {
            "rows": self.kept_rows,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "clipped_rows": fates.count("clipped"),
            "dropped_rows": fates.count("dropped"),
            "skipped_rows": fates.count("skipped"),
            "left_out_rows": self.left_out,
        }

    def padded_tokens_of(self, batch: int) -> int:
        """Tokens of its forward pass, padding included."""
        indices = self.batches[batch]
        return len(indices) * max(self.rows[index].length for index in indices)

    def shards(
        self, hidden_size: int, storage: StorageFormat, shard_bytes: int, every_last: bool = False
    ) -> tuple[ShardPlan, ...]:
        """Batches in order; a shard ends with the batch that brings it to `shard_bytes` or more."""
        shards: list[ShardPlan] = []
        start = rows = tokens = supervised = 0
        for number, batch in enumerate(self.batches):
            rows += len(batch)
            tokens += sum(self.rows[index].length for index in batch)
            supervised += sum(self.rows[index].supervised for index in batch)
            sizes = ShardSizes(rows, tokens, supervised, hidden_size, storage, every_last)
            if sizes.bytes >= shard_bytes or number + 1 == len(self.batches):
                shards.append(ShardPlan(range(start, number + 1), sizes))
                start, rows, tokens, supervised = number + 1, 0, 0, 0
        return tuple(shards)


def plan_batches(
    conversations: Iterable[TokenRow],
    max_length: int,
    forward_tokens: int,
    *,
    long_rows: LongRows = "clip",
    max_tokens: int | None = None,
    first: int = 0,
    total: int | None = None,
) -> Plan:
    """Reads loss masks once, and keeps nothing but lengths.

    Args:
        max_tokens: reading stops before the row that would bring the plan beyond it, but never before the
            first row that is kept.
        first: number of the first of `conversations`.
        total: how many there are, to count those that are left out.
    """
    rows: list[KeptRow] = []
    tokens = 0
    for conversation in conversations:
        row = keep(conversation.loss_mask, max_length, long_rows)
        if max_tokens is not None and tokens and row.length and tokens + row.length > max_tokens:
            break
        rows.append(row)
        tokens += row.length
    lengths = [row.length for row in rows]
    batches = [
        batch
        for start in range(0, len(rows), WINDOW)
        for batch in length_batches(range(start, min(start + WINDOW, len(rows))), lengths, forward_tokens)
    ]
    return Plan(first, tuple(rows), tuple(batches), max(total or 0, len(rows)) - len(rows))


def length_batches(
    indices: Iterable[int], lengths: Sequence[int], forward_tokens: int
) -> list[tuple[int, ...]]:
    """Groups rows of similar length, longest first, so that each fits `forward_tokens` when padded.

    Rows of length 0 are left out; a row longer than the budget gets a batch of its own. Equal lengths keep
    the order of `indices`.
    """
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    for index in sorted((i for i in indices if lengths[i]), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > forward_tokens:
            batches.append(tuple(batch))
            batch = []
        batch.append(index)
    if batch:
        batches.append(tuple(batch))
    return batches
