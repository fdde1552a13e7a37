"""What EAGLE-1 and EAGLE-3 heads have in common: embedding, decoder layers, states that are fed back.

The input at index i is the pair (feature f_i, token x_{i+1}) at RoPE position i, and the prediction is
x_{i+2}. A pass of the head, in training and in decoding alike:

    feature      = fuse(what the target gives)          or feedback(hidden) of the draft step before
    x, residual  = enter(embed(tokens), feature)
    for layer in layers:                                 behind the first one: x, residual =
        layer.enter(hidden) queries, keys, values from x; attention hidden   = layer.output(residual,
        attended)
    logits       = logits(hidden)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from stages.heads.decoder_config import DecoderHeadConfig
from stages.heads.layers import DraftLayer, HiddenLayer
from stages.heads.rotary import RotaryEmbedding

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer: its number, queries [..., Hq, D], keys and values [..., Hkv, D] to [..., Hq, D]."""


class DecoderHead(nn.Module, ABC):
    """A head that drafts token by token."""

    config: DecoderHeadConfig
    lm_head: nn.Linear

    def __init__(self, config: DecoderHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.rotary = RotaryEmbedding(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.target_hidden_size)
        self.embed_tokens.weight.requires_grad_(False)

    @property
    @abstractmethod
    def layers_in_order(self) -> Sequence[DraftLayer]:
        """The decoder layers, first to last."""

    @property
    @abstractmethod
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 [Vd], ascending."""

    @abstractmethod
    def fuse(self, state: Tensor) -> Tensor:
        """What the target gives (see ``config.state``) to features [..., h]; never for drafted states."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's frozen embedding of *target* ids: [...] to [..., h]."""
        return self.embed_tokens(token_ids)

    @abstractmethod
    def enter(self, embeds: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Attention input [..., h or 2h] and residual [..., h] of the first layer."""

    def feedback(self, hidden: Tensor) -> Tensor:
        """What the next draft step takes as its feature, from the last layer's output [..., h]."""
        return hidden

    def scored(self, hidden: Tensor) -> Tensor:
        """The last layer's output [..., h] as ``lm_head`` takes it."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the draft vocabulary [..., Vd], from the last layer's output [..., h]."""
        return self.lm_head(self.scored(hidden))

    def forward(self, tokens: Tensor, feature: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass over the same tokens in all layers: the last layer's output [..., h].

        Args:
            tokens: [...] target ids.
            feature: [..., h], fused or fed back.
            positions: [...] of the features.
        """
        x, residual = self.enter(self.embed(tokens), feature)
        hidden = feature
        for number, layer in enumerate(self.layers_in_order):
            if number:
                assert isinstance(layer, HiddenLayer)
                x, residual = layer.enter(hidden)
            keys, values = layer.keys_values(x, positions)
            hidden = layer.output(residual, attend(number, layer.queries(x, positions), keys, values))
        return hidden
