"""The EAGLE-3 draft head (arXiv 2503.01840, section 3): feature fusion, one decoder layer, a reduced
vocabulary.

The module is a set of small steps rather than one ``forward``, because training and decoding attend
differently (training-time test against a draft tree) and must otherwise compute the very same thing:

    fuse -> attention_input -> queries, keys_values -> (the caller's attention) -> output -> logits
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stages.heads.config import Eagle3Config
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
    """Projections only: what attends to what is the caller's business. Inputs are 2h wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        h, d = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * h, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(2 * h, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(2 * h, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, h, bias=False)


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """The head's one decoder layer; the names are those of the published checkpoints."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Head(nn.Module):
    """An EAGLE-3 head with the published tensor names.

    The input at index i is the pair (feature f_i, token x_{i+1}) at RoPE position i, and the prediction is
    x_{i+2}.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        h = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.target_hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(3 * config.target_hidden_size, h, bias=False)
        self.midlayer = DraftLayer(config)
        self.norm = RMSNorm(h, config.rms_norm_eps)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
        self.rotary = RotaryEmbedding(config)
        # Until set_vocabulary is called, the first Vd target ids.
        self.d2t = nn.Buffer(torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.t2d = nn.Buffer(torch.arange(config.vocab_size) < config.draft_vocab_size)

    def set_vocabulary(self, draft_ids: Tensor) -> None:
        """Make ``draft_ids`` (int64 [Vd], distinct target ids in ascending order) the draft vocabulary.

        ``d2t`` holds offsets, ``target_id = draft_id + d2t[draft_id]``; ``t2d`` marks the target ids covered.

        Raises:
            ValueError: the ids are not Vd distinct, ascending ids of the target.
        """
        size = self.config.draft_vocab_size
        if draft_ids.shape != (size,) or bool((draft_ids.diff() <= 0).any()):
            raise ValueError(f"the draft vocabulary must be {size} distinct target ids in ascending order")
        draft_ids = draft_ids.to(self.d2t.device)
        self.d2t.copy_(draft_ids - torch.arange(size, device=draft_ids.device))
        self.t2d.zero_()
        self.t2d[draft_ids] = True

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 [Vd], ascending."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def fuse(self, aux: Tensor) -> Tensor:
        """Target features [..., 3h] (low, mid, high) to the head's width [..., h]. Never applied to
        drafted states."""
        return self.fc(aux)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's frozen embedding of *target* ids: [...] to [..., h]."""
        return self.embed_tokens(token_ids)

    def attention_input(self, embeds: Tensor, feature: Tensor) -> Tensor:
        """cat(input_layernorm(embedding), hidden_norm(feature)): [..., 2h]."""
        layer = self.midlayer
        return torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(feature).to(embeds.dtype)), dim=-1)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [..., Hq, D] of the attention input x [..., 2h]."""
        return self.rotary(
            self.midlayer.self_attn.q_proj(x).unflatten(-1, (-1, self.config.head_dim)), positions
        )

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values, each [..., Hkv, D], of the attention input x [..., 2h]."""
        attention, split = self.midlayer.self_attn, (-1, self.config.head_dim)
        keys = self.rotary(attention.k_proj(x).unflatten(-1, split), positions)
        return keys, attention.v_proj(x).unflatten(-1, split)

    def output(self, feature: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [..., h], from the *un-normed* feature and the attention's result [..., Hq, D].

        This pre-norm state is what the next draft step takes as its feature.
        """
        layer = self.midlayer
        hidden = feature + layer.self_attn.o_proj(attended.flatten(-2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the draft vocabulary [..., Vd]."""
        return self.lm_head(self.norm(hidden))


def init_from_target(head: Eagle3Head, weights: Mapping[str, Tensor], *, output: bool = True) -> None:
    """Copy the target's embedding into the head and, with ``output``, start ``norm`` and ``lm_head`` from
    the target's.

    Args:
        weights: ``embed_tokens.weight`` [V, h], ``norm.weight`` [h] and, unless tied, ``lm_head.weight``
            [V, h].
        output: start the output side from the target instead of at random; ``set_vocabulary`` comes first.
    """
    with torch.no_grad():
        embedding = weights["embed_tokens.weight"]
        head.embed_tokens.weight.copy_(embedding)
        if output:
            head.norm.weight.copy_(weights["norm.weight"])
            head.lm_head.weight.copy_(weights.get("lm_head.weight", embedding)[head.draft_ids])
