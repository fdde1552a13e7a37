"""Decoder layers of a draft head, as the small steps that training and decoding share.

What attends to what is the caller's business: training attends from queries to a prefix and to each query's
own later keys (training-time test), decoding to a slot's rows and the ancestors in a tree.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.heads.decoder_config import DecoderHeadConfig
from stages.heads.rotary import RotaryEmbedding


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain; statistics in fp32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """The projections."""

    def __init__(self, config: DecoderHeadConfig, width: int) -> None:
        """``width``: of the input, h or 2h."""
        super().__init__()
        h, d = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, h, bias=False)


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, config: DecoderHeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """What all layers do with an attention input x: ``queries``, ``keys_values``, and then ``output``."""

    def __init__(self, config: DecoderHeadConfig, rotary: RotaryEmbedding, width: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, width)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = rotary  # of all layers; it has neither parameters nor buffers
        self._split = (-1, config.head_dim)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [..., Hq, D] of the attention input x [..., width]."""
        return self.rotary(self.self_attn.q_proj(x).unflatten(-1, self._split), positions)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each [..., Hkv, D], of the attention input x [..., width]."""
        keys = self.rotary(self.self_attn.k_proj(x).unflatten(-1, self._split), positions)
        return keys, self.self_attn.v_proj(x).unflatten(-1, self._split)

    def output(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [..., h], from its residual and the attention's result [..., Hq, D]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class FusionLayer(DraftLayer):
    """EAGLE-3's first layer, whose attention sees embedding and feature side by side."""

    def __init__(
        self, config: DecoderHeadConfig, rotary: RotaryEmbedding, *, norm_before_residual: bool
    ) -> None:
        super().__init__(config, rotary, 2 * config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._norm_before_residual = norm_before_residual

    def enter(self, embeds: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """The attention input [..., 2h] and the residual [..., h]."""
        normed = self.hidden_norm(feature)
        x = torch.cat((self.input_layernorm(embeds), normed.to(embeds.dtype)), dim=-1)
        return x, self.residual(feature, normed)

    def residual(self, feature: Tensor, normed: Tensor) -> Tensor:
        """What the layer's output is added to, of the feature as it is and as ``hidden_norm`` makes it."""
        return normed if self._norm_before_residual else feature


class HiddenLayer(DraftLayer):
    """A plain layer; EAGLE-1's first one has no norm before its attention."""

    def __init__(self, config: DecoderHeadConfig, rotary: RotaryEmbedding, *, normed: bool = True) -> None:
        super().__init__(config, rotary, config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps) if normed else nn.Identity()

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The attention input [..., h] and the residual [..., h]."""
        return self.input_layernorm(hidden), hidden
