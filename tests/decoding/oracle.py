"""A drafter that knows the answer and proposes it, right with a given probability, among wrong siblings."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from stages.decoding import DraftTree, SamplingParams, TreePlan
from stages.decoding.drafters import StateKind


class OracleDrafter:
    """Proposes random trees around a known output, so that paths of every shape get accepted and rejected.

    It also records what the decoder hands it, for tests of the alignment of features and tokens.
    """

    state: StateKind = "aux"
    cache = None

    def __init__(self, output: list[int], vocab_size: int, right: float, seed: int) -> None:
        self.output, self.vocab_size, self.right = output, vocab_size, right
        self.random = random.Random(seed)
        self.passes: list[int] = []
        self.rows = None
        self.features: list[Tensor] = []
        self.tokens: list[int] = []
        self.done = 0

    def start(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        known: int = 0,
        source: int | None = None,
    ) -> None:
        self.features, self.tokens, self.done = [], [], known + 1 - len(prompt_ids)

    def extend(self, slots: Sequence[int], states: Tensor | None, tokens: Sequence[Sequence[int]]) -> None:
        assert states is not None
        self.features.append(states)
        self.tokens += tokens[0]
        self.done += len(tokens[0])

    def propose(self, slots: Sequence[int], plans: Sequence[TreePlan]) -> list[DraftTree]:
        return [self.tree(plans[0].depth)]

    def tree(self, depth: int) -> DraftTree:
        tokens, parents, depths = [self.tokens[-1]], [-1], [0]
        on_path = 0
        for level in range(1, min(depth, 5) + 1):
            frontier = [i for i, d in enumerate(depths) if d == level - 1]
            parent = on_path if on_path in frontier else self.random.choice(frontier)
            truth = self.output[self.done + level - 1] if self.done + level - 1 < len(self.output) else 0
            siblings = self.random.sample(range(self.vocab_size), self.random.randint(1, 3))
            if truth in siblings:
                siblings.remove(truth)
            hit = parent == on_path and self.random.random() < self.right
            if hit:
                siblings.insert(self.random.randint(0, len(siblings)), truth)
            for token in siblings:
                if hit and token == truth:
                    on_path = len(tokens)
                tokens.append(token)
                parents.append(parent)
                depths.append(level)
            if not siblings:
                break
        return DraftTree(tuple(tokens), tuple(parents), tuple(depths))


def stacked(features: list[Tensor]) -> Tensor:
    """All features handed over, [tokens, 3h]."""
    return torch.cat(features)
