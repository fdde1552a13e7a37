"""Drafters: from what the target has verified to a tree of likely continuations."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from stages.decoding.tree import DraftTree, TreeConfig, TreeGrowth, bit
from stages.heads import Eagle3Head
from stages.targets import SlotCache, SlotStep
from stages.targets.attention import attend


class Drafter(Protocol):
    """Follows one sequence: learns what was verified, proposes what may come next."""

    def start(self) -> None:
        """Begin a new sequence."""

    def extend(self, features: Tensor, tokens: Tensor) -> None:
        """Take verified pairs (f_i, x_{i+1}): target features [1, N, 3h] and the tokens that follow them,
        [1, N].

        The last token becomes the root of the next tree. State drafted before is dropped.
        """

    def propose(self, temperature: float, depth: int) -> DraftTree:
        """A tree of at most ``depth`` levels below the last verified token."""


class Eagle3Drafter:
    """Drafts with an EAGLE-3 head (EAGLE-2's tree over EAGLE-3's recurrence).

    The head's stable cache holds one row a verified pair, made from true target features; the rows of
    drafted nodes lie behind them and are overwritten by the next ``extend``.
    """

    def __init__(self, head: Eagle3Head, tree: TreeConfig, device: torch.device) -> None:
        config = head.config
        self.head, self.tree = head, tree
        self._device = device
        self._draft_ids = head.draft_ids
        self._scale = config.head_dim**-0.5
        self._cache = SlotCache(
            layers=1,
            slots=1,
            kv_heads=config.num_key_value_heads,
            rows=1,
            head_dim=config.head_dim,
            dtype=head.fc.weight.dtype,
            device=device,
        )
        self._most_expanded = tree.width * max(tree.depth - 1, 0)
        self._length = 0
        self._root = -1
        self._state = torch.empty(0)

    def start(self) -> None:
        self._length = 0

    @torch.inference_mode()
    def extend(self, features: Tensor, tokens: Tensor) -> None:
        count = tokens.shape[1]
        self._cache.reserve(self._length + count + self._most_expanded)
        step = SlotStep.causal(self._cache, 0, [self._length], count)
        positions = torch.arange(self._length, self._length + count, device=self._device)[None]
        hidden = self._forward(self.head.fuse(features), tokens, positions, step)
        self._length += count
        self._state = hidden[:, -1:]
        self._root = int(tokens[0, -1])

    @torch.inference_mode()
    def propose(self, temperature: float, depth: int) -> DraftTree:
        if depth < 1 or self.tree.kind == "none":
            return DraftTree.root_only(self._root)
        growth = TreeGrowth(self.tree, self._root, depth)
        self._branch(growth, [-1], self._state, temperature)
        expanded = _Expanded()
        parent_states, parents = self._state, [-1]
        level = 1
        while frontier := growth.frontier():
            place = {candidate: i for i, candidate in enumerate(parents)}
            features = parent_states[:, [place[growth.parent(candidate)] for candidate in frontier]]
            step = SlotStep.tree(
                self._cache,
                0,
                [self._length],
                torch.tensor([expanded.add(frontier, growth)], device=self._device),
                offset=expanded.count - len(frontier),
            )
            tokens = torch.tensor([[growth.token(candidate) for candidate in frontier]], device=self._device)
            # Level 1 pairs the last verified state with a drafted token: one position behind the stable rows.
            positions = torch.full_like(tokens, self._length + level - 1)
            parent_states, parents = self._forward(features, tokens, positions, step), frontier
            self._branch(growth, frontier, parent_states, temperature)
            level += 1
        return growth.tree()

    def _forward(self, feature: Tensor, tokens: Tensor, positions: Tensor, step: SlotStep) -> Tensor:
        """One pass of the head: feature [1, N, h], tokens and positions [1, N] to states [1, N, h]."""
        head = self.head
        x = head.attention_input(head.embed(tokens), feature)
        keys, values = head.keys_values(x, positions)
        attended = attend(
            step,
            0,
            head.queries(x, positions).transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            scale=self._scale,
        )
        return head.output(feature, attended.transpose(1, 2))

    def _branch(self, growth: TreeGrowth, parents: list[int], states: Tensor, temperature: float) -> None:
        """Add the most probable children of each parent, from its state in states [1, len(parents), h]."""
        logits = self.head.logits(states)[0].float()
        if temperature > 0:
            logits = logits / temperature
        width = min(self.tree.width, logits.shape[-1])
        top = logits.topk(width, dim=-1)
        log_probs = top.values - logits.logsumexp(-1, keepdim=True)
        tokens = self._draft_ids[top.indices]
        for parent, ids, scores in zip(parents, tokens.tolist(), log_probs.tolist(), strict=True):
            growth.add_children(parent, ids, scores)


class _Expanded:
    """Ancestor words of the nodes the head has run on this cycle, over their rows behind the stable ones."""

    def __init__(self) -> None:
        self._words: dict[int, int] = {-1: 0}

    @property
    def count(self) -> int:
        return len(self._words) - 1

    def add(self, candidates: list[int], growth: TreeGrowth) -> list[int]:
        """Give the candidates the next rows; returns their words, as signed 64-bit integers."""
        words = []
        for candidate in candidates:
            word = self._words[growth.parent(candidate)] | bit(self.count)
            self._words[candidate] = word
            words.append(word)
        return words
