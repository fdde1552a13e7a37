"""An EAGLE head that drafts on the device: the passes of `EagleDrafter`, in one shape."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import draft_topk
from kernels.draft_topk import DraftTopK
from stages.decoding.device.drafts import Moved
from stages.decoding.device.growth import Growth, Trees, chain_words
from stages.decoding.device.state import Rows
from stages.decoding.drafters import EagleDrafter
from stages.decoding.tree import TreeConfig
from stages.targets import SlotStep
from stages.targets.attention import attend

NOISE_STRENGTH = 0.5
"""How much the target's noise counts in the ranking: the host's first guess, which it would fit."""


class HeadDrafts:
    """The head's stable cache is that of the host's drafter, row i the pair (f_i, x_{i+1}); beside it lies
    the head's state after the last pair of each slot."""

    def __init__(self, drafter: EagleDrafter, tree: TreeConfig) -> None:
        """``tree``: none, a chain or a dynamic one."""
        self._drafter, self._head = drafter, drafter.head
        self.state = drafter.state
        config, ids = self._head.config, self._head.draft_ids
        self._scale, self._window = config.head_dim**-0.5, config.sliding_window
        # Ascending ids, so that as many as the target has are the target's.
        self._ids = None if len(ids) == config.vocab_size else ids.contiguous()
        cache = drafter.cache
        self._last = cache.data.new_zeros(cache.slots + 1, config.hidden_size)
        self._shape(tree)

    def of_shape(self, tree: TreeConfig) -> HeadDrafts:
        """The same sequences drafted for in another shape: the two can take turns."""
        other = copy.copy(self)
        other._shape(tree)
        return other

    def _shape(self, tree: TreeConfig) -> None:
        self._tree = tree
        self._width = width = min(tree.width, len(self._head.draft_ids))
        self.depth = tree.depth
        self.nodes = 1 + min(tree.nodes, width + (tree.depth - 1) * width**2)

    def reserve(self, tokens: int) -> None:
        self._drafter.cache.reserve(tokens + max(self.depth + 1, self._width * (self.depth - 1)))

    def enter(self, slot: int, prompt_ids: Sequence[int]) -> None:
        self._last[slot] = self._drafter.hand_over(slot)

    def leave(self, slot: int, length: int) -> None:
        self._drafter.take_back(slot, length)

    def draft(self, rows: Rows) -> Trees:
        if not self.depth:
            return Trees.chains(rows.root, rows.root.new_empty(len(rows.root), 0))
        growth, width = Growth(self._tree), self._width
        states = self._last[rows.slots][:, None]  # [B, F, h], of the nodes that are expanded
        scores = torch.zeros(states.shape[:2], device=states.device)
        best = self._children(rows, states, scores, depth=0)
        growth.add(None, best.token, best.score)
        words = torch.zeros_like(rows.root)[:, None]  # [B, F]
        for depth in range(1, self._tree.depth):
            front = growth.frontier()
            stored = (depth - 1) * width
            own = stored + torch.arange(width, device=words.device)
            words = words.gather(1, front.above) | (torch.ones_like(own) << own)
            parents = front.above[..., None].expand(-1, -1, states.shape[-1])
            states = self._pass(
                front.tokens,
                self._head.feedback(states.gather(1, parents)),
                # The children of the root stand one position behind the stable rows.
                (rows.length + depth - 1)[:, None].expand(-1, width),
                SlotStep.static(self._drafter.cache, rows.slots, rows.length, words, offset=stored),
            )
            best = self._children(rows, states, front.scores, depth)
            growth.add(front, best.token, best.score)
        return growth.trees(rows.root)

    def extend(self, rows: Rows, states: Tensor | None, moved: Moved) -> None:
        assert states is not None, "a head needs the target's states"
        columns = moved.path.shape[1]
        path = moved.path[..., None].expand(-1, -1, states.shape[-1])
        feature = self._head.fuse(states.gather(1, path).to(self._last.dtype))
        ordinal = torch.arange(columns, device=feature.device)
        words = chain_words(columns, feature.device).expand(len(rows.slots), -1)
        hidden = self._pass(
            moved.tokens,
            feature,
            rows.length[:, None] + ordinal,
            SlotStep.static(self._drafter.cache, rows.slots, rows.length, words),
        )
        last = (moved.emitted - 1).clamp(min=0)[:, None, None].expand(-1, 1, hidden.shape[-1])
        changed = (moved.emitted > 0)[:, None]
        self._last[rows.slots] = torch.where(changed, hidden.gather(1, last)[:, 0], self._last[rows.slots])

    def storage(self) -> tuple[int, ...]:
        return (self._drafter.cache.data.data_ptr(),)

    def _pass(self, tokens: Tensor, feature: Tensor, positions: Tensor, step: SlotStep) -> Tensor:
        """The head over N rows of each sequence: tokens and positions int64 [B, N], feature [B, N, h] to the
        last layer's output [B, N, h]."""

        def attention(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            heads_first = (x.transpose(1, 2) for x in (query, key, value))  # [B, heads, N, D]
            out = attend(step, layer, *heads_first, scale=self._scale, window=self._window)
            return out.transpose(1, 2)

        return self._head(tokens, feature, positions, attention)

    def _children(self, rows: Rows, states: Tensor, scores: Tensor, depth: int) -> DraftTopK:
        """The best children of nodes ``depth`` levels down, with states [B, F, h] and scores fp32 [B, F]:
        [B, F, W]."""
        batch, nodes = scores.shape

        def each(values: Tensor) -> Tensor:
            return values[:, None].expand(-1, nodes).flatten()

        found = draft_topk(
            self._head.logits(states).flatten(0, 1),
            scores.flatten(),
            self._width,
            target_ids=self._ids,
            temperature=each(rows.temperature),
            strength=torch.full((batch * nodes,), NOISE_STRENGTH, device=states.device),
            positions=each(rows.length + depth),
            seed=each(rows.seed),
            sample=each(rows.sample),
        )
        return DraftTopK(*(part.unflatten(0, (batch, nodes)) for part in found))
