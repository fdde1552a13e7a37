"""An EAGLE head made ready to draft on a CPU: its weights packed, a pass one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cpu import DTYPES, load_ops
from stages.heads.decoder_head import DecoderHead
from stages.heads.eagle1 import Eagle1Head
from stages.heads.eagle3 import Eagle3Head
from stages.targets.cpu_layers import GATE_RUN, CpuLayers, pack_layer
from stages.targets.slots import RowStep

_FULL_NORM = 2  # rounded once, behind the gain, as in `stages.heads.layers`
_RESIDUAL_NORMED, _FEEDBACK_NORMED = 1, 2  # `Head::Switch` in draft.h


class CpuHead:
    """Computes what the head's own modules do, from a packed copy of its matrices and its own norms: the head
    must not be changed.

    A pass reads all of a head's weights, and that is what it takes: ``coarse`` keeps them in 8 bits, with a
    scale for each output, where that is faster. Drafts differ a little then, and the text does not.

    op: the head as ``torch.ops.eagle_cpu.draft`` takes it.
    """

    def __init__(self, head: DecoderHead, *, coarse: bool = False) -> None:
        config = head.config
        layers = CpuLayers(
            weights=[tensor for layer in head.layers_in_order for tensor in _packed(layer, coarse)],
            kinds=[0, config.sliding_window or 0] * config.num_hidden_layers,
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
        self._fuses = isinstance(head, Eagle3Head)
        self._norms_feedback = isinstance(head, Eagle3Head) and head.config.norm_output
        self._rotary = head.rotary
        self._table: Tensor = head.embed_tokens.weight.detach()
        self._cos = self._sin = self._table.new_empty(1, 0, config.head_dim)  # [1, positions, D]
        self.op = torch.classes.eagle_cpu.Head(layers.stack, self._table, *_parts(head, coarse))

    @classmethod
    def of(cls, head: DecoderHead, *, coarse: bool = False) -> CpuHead | None:
        """None where the ops do not apply: on a GPU, in float16, for odd sizes, or without a compiler."""
        weight, config = head.embed_tokens.weight, head.config
        even = config.head_dim % 2 == 0 and config.hidden_size % 2 == 0
        fits = config.intermediate_size % GATE_RUN == 0 and even
        if weight.device.type != "cpu" or weight.dtype not in DTYPES or not fits or load_ops() is not None:
            return None
        return cls(head, coarse=coarse and torch.ops.eagle_cpu.coarse_pays())

    def fuse(self, state: Tensor) -> Tensor:
        """See ``DecoderHead.fuse``: [M, w] to [M, h]."""
        return torch.ops.eagle_cpu.head_fuse(self.op, state) if self._fuses else state

    def feedback(self, hidden: Tensor) -> Tensor:
        """See ``DecoderHead.feedback``."""
        return torch.ops.eagle_cpu.head_feedback(self.op, hidden) if self._norms_feedback else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``DecoderHead.logits``: [M, h] to [M, Vd]."""
        return torch.ops.eagle_cpu.head_logits(self.op, hidden)

    def forward(self, tokens: Tensor, feature: Tensor, positions: Tensor, step: RowStep, rows: int) -> Tensor:
        """One pass over rows of any sequences: the last layer's output [M, h].

        Args:
            tokens, positions: int64 [M].
            feature: [M, h], fused or fed back.
            step: where the rows' keys and values go in the head's cache, and what they see.
            rows: of a slot of that cache, which is more than any position.
        """
        cos, sin = self.turns(rows)
        return torch.ops.eagle_cpu.head_pass(
            self.op, tokens, feature, positions, step.places, step.where, cos, sin
        )

    def turns(self, rows: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, of ``rows`` positions at least: [1, positions, D]."""
        if self._cos.shape[1] < rows:
            cos, sin = self._rotary.tables(torch.arange(rows), self._table.dtype)
            self._cos, self._sin = cos[None], sin[None]
        return self._cos, self._sin


def _parts(head: DecoderHead, coarse: bool) -> list[Any]:
    """What stands before and behind the layers, in the order of ``Head`` in draft.h."""
    assert isinstance(head, Eagle3Head | Eagle1Head)
    pack = torch.ops.eagle_cpu.pack_coarsely if coarse else torch.ops.eagle_cpu.pack
    none = head.embed_tokens.weight.new_empty(0)
    fc, output = pack(head.fc.weight.detach()), pack(head.lm_head.weight.detach())
    if isinstance(head, Eagle1Head):
        bias = None if head.fc.bias is None else head.fc.bias.detach()
        scale = float(head.config.logit_scale)
        return [none, [], fc, bias, none, none, none, output, head.draft_ids, 0, scale]
    whole = head.input_norm.weight.detach() if head.config.norm_before_fc else none
    norms: Any = head.fc_norm if head.config.fc_norm else []
    each = [norm.weight.detach() for norm in norms]
    gains = [head.midlayer.input_layernorm.weight.detach(), head.midlayer.hidden_norm.weight.detach()]
    switches = head.config.norm_before_residual * _RESIDUAL_NORMED
    switches += head.config.norm_output * _FEEDBACK_NORMED
    final = head.norm.weight.detach()
    return [whole, each, fc, None, *gains, final, output, head.draft_ids, switches, 1.0]


def _packed(layer: Any, coarse: bool) -> list[Tensor]:
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
        coarse=coarse,
    )
