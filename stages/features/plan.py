"""What to run in which order: how much of each conversation to keep, and which ones share a forward pass.

The plan depends on the conversations and the configuration only, so that a rerun makes the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from stages.artifacts.conversations import Conversation
from stages.features.layout import supervised_positions

WINDOW = 512  # conversations that are sorted by length together, and so held in memory at a time


@dataclass(frozen=True)
class KeptRow:
    """What training needs of a conversation: `length` tokens, `supervised` positions (0, 0: nothing)."""

    length: int
    supervised: int
    clipped: bool


def keep(loss_mask: Sequence[int], max_length: int) -> KeptRow:
    """Cuts a row at `max_length` tokens, then behind its last label: the tokens after it teach nothing."""
    mask = torch.tensor(loss_mask[:max_length], dtype=torch.uint8)
    positions = supervised_positions(mask, torch.tensor([0, len(mask)]))
    length = int(positions[-1]) + 2 if len(positions) else 0
    return KeptRow(length, len(positions), clipped=len(loss_mask) > max_length)


@dataclass(frozen=True)
class Plan:
    """Batches of row indices, grouped by the window of `WINDOW` conversations that they come from."""

    rows: tuple[KeptRow, ...]  # one a conversation, in the artifact's order
    windows: tuple[tuple[tuple[int, ...], ...], ...]  # [window][batch] -> indices into `rows`

    @property
    def kept_rows(self) -> int:
        return sum(row.length > 0 for row in self.rows)

    @property
    def skipped_rows(self) -> int:
        return len(self.rows) - self.kept_rows

    @property
    def clipped_rows(self) -> int:
        return sum(row.clipped and row.length > 0 for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(row.length for row in self.rows)

    @property
    def supervised(self) -> int:
        return sum(row.supervised for row in self.rows)

    def tokens_of(self, batches: int) -> int:
        """Tokens in the first `batches` batches of the plan."""
        order = [batch for window in self.windows for batch in window]
        return sum(self.rows[index].length for batch in order[:batches] for index in batch)


def plan_batches(conversations: Iterable[Conversation], max_length: int, batch_tokens: int) -> Plan:
    """Reads all loss masks once, and keeps nothing but lengths."""
    rows = tuple(keep(conversation.loss_mask, max_length) for conversation in conversations)
    lengths = [row.length for row in rows]
    windows = tuple(
        tuple(length_batches(range(start, min(start + WINDOW, len(rows))), lengths, batch_tokens))
        for start in range(0, len(rows), WINDOW)
    )
    return Plan(rows, windows)


def length_batches(
    indices: Iterable[int], lengths: Sequence[int], batch_tokens: int
) -> list[tuple[int, ...]]:
    """Groups rows of similar length, longest first, so that each fits `batch_tokens` when padded.

    Rows of length 0 are left out; a row longer than the budget gets a batch of its own. Equal lengths keep
    the order of `indices`.
    """
    batches: list[tuple[int, ...]] = []
    batch: list[int] = []
    for index in sorted((i for i in indices if lengths[i]), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            batches.append(tuple(batch))
            batch = []
        batch.append(index)
    if batch:
        batches.append(tuple(batch))
    return batches
