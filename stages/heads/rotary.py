"""Rotary position embedding of the draft head, with the target's theta and scaling (RoFormer, arXiv
2104.09864)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from stages.heads.decoder_config import DecoderHeadConfig


class RotaryEmbedding(nn.Module):
    """Rotates the two halves of each head's vector by an angle proportional to the position.

    Scaled variants (linear, llama3, yarn ...) take their frequencies from transformers, so that the head
    turns with the position exactly as the target does.
    """

    def __init__(self, config: DecoderHeadConfig) -> None:
        super().__init__()
        if config.rope_scaling is None:
            steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
            frequencies, scale = 1.0 / config.rope_theta ** (steps / config.head_dim), 1.0
        else:
            frequencies, scale = _scaled_frequencies(config)
        # Not a buffer: casting the head to bfloat16 rounds the angles, by radians at a few hundred tokens.
        self.frequencies = frequencies
        self.scale = scale

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate ``x`` [..., heads, head_dim] to ``positions`` [...]; computed in fp32, returned in x's
        dtype."""
        cos, sin = (half.unsqueeze(-2) for half in self._halves(positions, x.dtype))
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., head_dim] of both halves, rounded as ``forward`` has them."""
        cos, sin = self._halves(positions, dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def _halves(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[..., None].float() * self.frequencies  # [..., head_dim / 2]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def _scaled_frequencies(config: DecoderHeadConfig) -> tuple[Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert config.rope_scaling is not None
    rope = {"rope_theta": config.rope_theta, **config.rope_scaling}
    carrier = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )
    with torch.device("cpu"):  # the head itself may be built on the meta device
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](carrier, torch.device("cpu"))
