"""A decoder head made ready to draft on a CPU: its weights packed, its layers one op."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import DTYPES, load_ops, pack_linears
from stages.heads.decoder_head import DecoderHead
from stages.heads.layers import FusionLayer, RMSNorm
from stages.targets.cpu_layers import GATE_RUN, CpuLayers, pack_layer
from stages.targets.slots import RowStep

_FULL_NORM = 2  # rounded once, behind the gain, as in `stages.heads.layers`


class CpuHead:
    """Computes what the head's own modules do, from a packed copy of its weights."""

    def __init__(self, head: DecoderHead) -> None:
        # The embedding is large, and only read.
        self._head = copy.deepcopy(head, {id(head.embed_tokens): head.embed_tokens})
        config = head.config
        weights = [tensor for layer in head.layers_in_order for tensor in _packed(layer)]
        window = config.sliding_window or 0
        self._layers = CpuLayers(
            weights=weights,
            kinds=[0, window] * config.num_hidden_layers,
            sizes=[
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                config.intermediate_size,
                0,
            ],
            scale=config.head_dim**-0.5,
            softcap=0.0,
            eps=config.rms_norm_eps,
            norms=_FULL_NORM,
        )
        first = self._head.layers_in_order[0]
        self._fusion = first if isinstance(first, FusionLayer) else None
        self._table: Tensor = head.embed_tokens.weight.detach()
        self._cos = self._sin = self._table.new_empty(1, 0, config.head_dim)  # [1, positions, D]
        for layer in self._head.layers_in_order:  # packed above
            del layer.self_attn, layer.mlp
        pack_linears(self._head)
        for module in self._head.modules():
            if isinstance(module, RMSNorm):
                gain = module.weight.detach()
                module.forward = partial(_norm, weight=gain, eps=module.eps)  # type: ignore[method-assign]

    @classmethod
    def of(cls, head: DecoderHead) -> CpuHead | None:
        """None where the ops do not apply: on a GPU, in float16, for odd sizes, or without a compiler."""
        weight, config = head.embed_tokens.weight, head.config
        fits = config.intermediate_size % GATE_RUN == 0 and config.head_dim % 2 == 0
        if weight.device.type != "cpu" or weight.dtype not in DTYPES or not fits or load_ops() is not None:
            return None
        return cls(head)

    def fuse(self, state: Tensor) -> Tensor:
        """See ``DecoderHead.fuse``."""
        return self._head.fuse(state)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``DecoderHead.logits``."""
        return self._head.logits(hidden)

    def forward(self, tokens: Tensor, feature: Tensor, positions: Tensor, step: RowStep, rows: int) -> Tensor:
        """One pass over rows of any sequences: the last layer's output [M, h].

        Args:
            tokens, positions: int64 [M].
            feature: [M, h], fused or fed back.
            step: where the rows' keys and values go in the head's cache, and what they see.
            rows: of a slot of that cache, which is more than any position.
        """
        if self._cos.shape[1] < rows:
            cos, sin = self._head.rotary.tables(torch.arange(rows), self._table.dtype)
            self._cos, self._sin = cos[None], sin[None]
        entry, residual = self._enter(tokens, feature)
        none = self._table.new_empty(0)
        return self._layers(residual, step, positions, self._cos, self._sin, none, [], entry=entry)

    def _enter(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """See ``DecoderHead.enter``."""
        if self._fusion is None:
            return self._head.enter(self._head.embed(tokens), feature)
        left, right = self._fusion.input_layernorm, self._fusion.hidden_norm
        entry = torch.ops.eagle_cpu.normed_pairs(
            self._table, tokens, feature, left.weight, right.weight, left.eps, _FULL_NORM
        )
        return entry, self._fusion.residual(feature, entry[:, feature.shape[1] :])


def _norm(x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.eagle_cpu.norm(x, weight, eps, _FULL_NORM)


def _packed(layer: Any) -> list[Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    return pack_layer(
        [attention.q_proj, attention.k_proj, attention.v_proj],
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        {
            "input": getattr(layer.input_layernorm, "weight", None),
            "mlp": layer.post_attention_layernorm.weight,
        },
    )
