"""Medusa heads (arXiv 2401.10774): each guesses one token ahead from the target's last state, all at once.

Head k takes the target's state f_i after the final norm and predicts x_{i+2+k}; x_{i+1} is the target's own.
No head knows what the others guess, so the guesses of the levels of a tree are the same under every parent.
All heads score by the rows of the target's own lm_head that belong to the draft vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.heads.config import HeadKind
from stages.heads.medusa_config import MedusaConfig
from stages.heads.shared_output import SharedOutput


class ResidualBlocks(nn.Module):
    """x + silu(W x + b), once a layer; starts as the identity, so that a fresh head repeats the target's
    guess."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(h, h, bias=config.bias) for _ in range(config.layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHead(SharedOutput):
    """K heads with the names that vLLM loads, and their frozen output rows."""

    config: MedusaConfig
    kind: ClassVar[HeadKind] = "medusa"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(ResidualBlocks(config) for _ in range(config.heads))
        if config.shared_output:
            self.share_output()
        else:
            self.lm_heads = nn.ModuleList(
                nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
                for _ in range(config.heads)
            )
        self.first_vocabulary()

    def forward(self, last: Tensor) -> Tensor:
        """What each head makes of the target's states [..., h]: [K, ..., h]."""
        return torch.stack([blocks(last) for blocks in self.blocks])

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of all heads over the draft vocabulary [K, ..., Vd], from ``forward``'s [K, ..., h]."""
        scored = self.scored(hidden)
        if self.config.shared_output:
            return self.lm_head(scored)
        return torch.stack([head(states) for head, states in zip(self.lm_heads, scored, strict=True)])
