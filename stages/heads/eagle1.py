"""The EAGLE-1 draft head (arXiv 2401.15077; EAGLE-2 uses the same): it predicts the target's last states.

Its output at index i is a guess at the target's state f_{i+1} after the final norm. So the target's own
lm_head gives the tokens, and the guess is the next step's feature. The head keeps the rows of its draft
vocabulary; an engine that loads it has the whole lm_head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from stages.heads.config import HeadKind
from stages.heads.decoder_head import DecoderHead
from stages.heads.eagle1_config import Eagle1Config
from stages.heads.layers import DraftLayer, HiddenLayer
from stages.heads.shared_output import SharedOutput


class Eagle1Head(SharedOutput, DecoderHead):
    """An EAGLE-1 head with the published tensor names, and its frozen output rows."""

    config: Eagle1Config
    kind: ClassVar[HeadKind] = "eagle1"

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config)
        h = config.hidden_size
        self.fc = nn.Linear(2 * h, h, bias=config.bias)
        self.layers = nn.ModuleList(
            HiddenLayer(config, self.rotary, normed=number > 0) for number in range(config.num_hidden_layers)
        )
        self.share_output()
        self.first_vocabulary()

    @property
    def layers_in_order(self) -> Sequence[DraftLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def fuse(self, state: Tensor) -> Tensor:
        """The target's state after its final norm [..., h], as it is."""
        return state

    def enter(self, embeds: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.fc(torch.cat((embeds, feature.to(embeds.dtype)), dim=-1))
        first = self.layers[0]
        assert isinstance(first, HiddenLayer)
        return first.enter(hidden)
