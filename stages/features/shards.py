"""Collecting the states of batches in a shard of known size."""

from __future__ import annotations

import torch

from stages.features.layout import FeatureShard, ShardSizes
from stages.features.states import States, TokenBatch


class ShardBuilder:
    """Copies the batches of one shard, in order, to where the shard has them."""

    def __init__(self, sizes: ShardSizes) -> None:
        self._sizes = sizes
        self._tensors = sizes.empty()
        self._tensors["row_offsets"][0] = 0
        self._rows = self._tokens = self._supervised = 0

    def add(self, batch: TokenBatch, states: States) -> None:
        """Raises EagleError: a state is infinite or not a number."""
        states.wait()
        tensors = self._tensors
        rows = slice(self._rows, self._rows + len(batch.row_ids))
        tokens = slice(self._tokens, self._tokens + len(batch.input_ids))
        supervised = slice(self._supervised, self._supervised + len(states.last))
        context = slice(tokens.start - supervised.start, tokens.stop - supervised.stop)
        tensors["row_ids"][rows] = torch.tensor(batch.row_ids)
        tensors["row_offsets"][rows.start + 1 : rows.stop + 1] = batch.row_offsets[1:] + tokens.start
        tensors["input_ids"][tokens] = batch.input_ids
        tensors["loss_mask"][tokens] = batch.loss_mask
        tensors["aux"][tokens] = states.aux
        tensors["last"][supervised] = states.last
        tensors["target_argmax"][supervised] = states.target_argmax
        if states.aux_scale is not None and states.last_scale is not None:
            tensors["aux_scale"][tokens] = states.aux_scale
            tensors["last_scale"][supervised] = states.last_scale
        if states.context is not None:
            tensors["context"][context] = states.context
        if states.context_scale is not None:
            tensors["context_scale"][context] = states.context_scale
        self._rows, self._tokens, self._supervised = rows.stop, tokens.stop, supervised.stop

    def shard(self) -> FeatureShard:
        """The shard, once all of its batches are there.

        Raises:
            ValueError: batches are missing.
        """
        sizes = self._sizes
        if (self._rows, self._tokens, self._supervised) != (sizes.rows, sizes.tokens, sizes.supervised):
            raise ValueError(f"the shard has {self._tokens} of {sizes.tokens} tokens")
        return FeatureShard(**self._tensors)
