"""One sequence and one EAGLE-3 head, for what has not moved to ``stages.decoding.drafters`` yet."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.decoding.drafters.eagle import EagleDrafter
from stages.decoding.sampling import SamplingParams
from stages.decoding.tree import DraftTree, TreeConfig
from stages.heads import Eagle3Head


class Eagle3Drafter:
    """`EagleDrafter` of slot 0."""

    def __init__(self, head: Eagle3Head, tree: TreeConfig, device: torch.device) -> None:
        self._drafter, self._tree = EagleDrafter(head), tree

    def start(self) -> None:
        self._drafter.start(0, [0], SamplingParams())

    def extend(self, features: Tensor, tokens: Tensor) -> None:
        self._drafter.extend([0], features[0], tokens.tolist())

    def propose(self, temperature: float, depth: int) -> DraftTree:
        return self._drafter.propose([0], [self._tree.plan(depth)])[0]
