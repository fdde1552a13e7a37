"""Collecting the states of batches until they fill a shard."""

from __future__ import annotations

import torch

from stages.features.layout import FeatureShard, shard_bytes
from stages.features.states import States, TokenBatch


class ShardBuilder:
    """Takes batches one after the other; `full` once they need `target_bytes` or more in a shard."""

    def __init__(self, target_bytes: int) -> None:
        self._target_bytes = target_bytes
        self._bytes = 0
        self._parts: list[tuple[TokenBatch, States]] = []

    @property
    def empty(self) -> bool:
        return not self._parts

    @property
    def full(self) -> bool:
        return self._bytes >= self._target_bytes

    def add(self, batch: TokenBatch, states: States) -> None:
        supervised, hidden = states.last.shape
        tokens, number = len(batch.input_ids), states.last.element_size()
        self._parts.append((batch, states))
        self._bytes += shard_bytes(len(batch.row_ids), tokens, supervised, hidden, number)

    def take(self) -> FeatureShard:
        """The batches so far as a shard; starts an empty one."""
        parts, self._parts, self._bytes = self._parts, [], 0
        lengths = torch.cat([batch.row_offsets.diff() for batch, _ in parts])
        return FeatureShard(
            input_ids=torch.cat([batch.input_ids for batch, _ in parts]),
            loss_mask=torch.cat([batch.loss_mask for batch, _ in parts]),
            row_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            row_ids=torch.tensor([row for batch, _ in parts for row in batch.row_ids]),
            aux=torch.cat([states.aux for _, states in parts]),
            last=torch.cat([states.last for _, states in parts]),
            target_argmax=torch.cat([states.target_argmax for _, states in parts]),
        )
