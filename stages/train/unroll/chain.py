"""Training-time test: the head drafts a chain from every query at once, on true tokens and its own states.

Step i of the query at index j takes the token x_{j+1+i}, its own output of step i-1 as the feature (step 0:
what the target gives), RoPE position j+i, and predicts x_{j+2+i}. Gradients flow through all steps (arXiv
2503.01840, 3.2). Equal to drafting a chain of i+1 tokens from the prefix that ends at j, if the tokens
drafted are the true ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.heads import DecoderHead
from stages.heads.layers import HiddenLayer
from stages.train.attention import RowGroup, every_key, ttt_attention
from stages.train.batch import TttBatch


def unroll_chain(head: DecoderHead, batch: TttBatch, states: Tensor, steps: int) -> list[Tensor]:
    """The last layer's output at each draft step, [Q, h] each.

    Context tokens pass through the last layer's key and value projections and no further: nothing else of
    that layer looks at them. Of the layers before it they need everything.

    Args:
        states: what the target gives the head at every key, [N, 3h] or [N, h].
    """
    chain = _Chain(head, batch)
    hidden = [chain.first(head.fuse(states))]
    for step in range(1, steps):
        hidden.append(chain.next(head.feedback(hidden[-1]), step))
    return hidden


class _Chain:
    """The keys and values of all layers: of every key at step 0, and each query's own of the steps since."""

    def __init__(self, head: DecoderHead, batch: TttBatch) -> None:
        self._head = head
        self._batch = batch
        self._layers = head.layers_in_order
        self._dtype = batch.aux.dtype
        self._shared: list[tuple[Tensor, Tensor]] = []  # of each layer: [N, Hkv, D]
        self._own: list[tuple[list[Tensor], list[Tensor]]] = []  # of each layer, a step each: [Q, 1, Hkv, D]
        self._positions = batch.positions[batch.queries]

    def first(self, feature: Tensor) -> Tensor:
        """Step 0, from features [N, h]: the output [Q, h] at the queries."""
        batch, hidden = self._batch, feature
        x, residual = self._head.enter(self._head.embed(batch.tokens).to(self._dtype), feature)
        for number, layer in enumerate(self._layers):
            if isinstance(layer, HiddenLayer) and number:
                x, residual = layer.enter(hidden)
            self._shared.append(layer.keys_values(x, batch.positions))
            if number + 1 == len(self._layers):
                x, residual = x[batch.queries], residual[batch.queries]
                positions, groups = self._positions, batch.groups
            else:
                positions, groups = batch.positions, every_key(batch.groups)
            queries = layer.queries(x, positions)
            none = queries.new_empty(len(x), 0, *self._shared[-1][0].shape[1:])
            hidden = layer.output(residual, self._attend(number, queries, none, none, groups))
            self._own.append(([], []))
        return hidden

    def next(self, feature: Tensor, step: int) -> Tensor:
        """A later step, from what is fed back [Q, h]: the output [Q, h]."""
        tokens, positions = self._batch.step_tokens[step], self._positions + step
        x, residual = self._head.enter(self._head.embed(tokens).to(self._dtype), feature)
        hidden = feature
        for number, layer in enumerate(self._layers):
            if isinstance(layer, HiddenLayer) and number:
                x, residual = layer.enter(hidden)
            for kept, new in zip(self._own[number], layer.keys_values(x, positions), strict=True):
                kept.append(new[:, None])
            own_keys, own_values = (torch.cat(kept, dim=1) for kept in self._own[number])
            queries = layer.queries(x, positions)
            attended = self._attend(number, queries, own_keys, own_values, self._batch.groups)
            hidden = layer.output(residual, attended)
        return hidden

    def _attend(
        self, number: int, queries: Tensor, own_keys: Tensor, own_values: Tensor, groups: Sequence[RowGroup]
    ) -> Tensor:
        window = self._head.config.sliding_window
        return ttt_attention(queries, *self._shared[number], own_keys, own_values, groups, window)
