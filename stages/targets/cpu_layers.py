"""A target's whole stack of decoder layers as one CPU op, for the families whose layers are of Llama's kind.

Weights are packed once, and a forward is one call: no Python between the layers, every row's result the same
bits whatever rows are beside it. Other families run module by module with packed linear layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kernels.cpu import Drawing, PackedLinear
from stages.targets.slots import RowStep

FAMILIES = frozenset({"Gemma2", "Gemma3", "Llama", "Mistral", "Qwen2", "Qwen3"})
"""Names of decoder layers in transformers that the op computes as they do, without `DecoderLayer`."""

_ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
GATE_RUN = 32
"""Rows of the gate, and as many of the up projection, that the op finds in each other's neighbourhood."""


class CpuLayers:
    """A stack of decoder layers as the op takes it."""

    def __init__(
        self,
        weights: list[Tensor],
        kinds: list[int],
        sizes: list[int],
        *,
        scale: float,
        softcap: float,
        eps: float,
        norms: int,
    ) -> None:
        """Args:
        weights: per layer, in the order of ``LayerTensor`` in layers.h; empty where a layer has none.
        kinds: per layer, which rotary embedding, and the window or 0.
        sizes: query heads, key heads, head size, inner size, activation.
        norms: 0: Llama's, rounded before the gain; 1: Gemma's, gain + 1; 2: rounded behind the gain.
        """
        self.eps, self.norms = eps, norms
        self.stack = torch.classes.eagle_cpu.Layers(weights, kinds, sizes, scale, softcap, eps, norms)

    def __call__(
        self,
        x: Tensor,
        step: RowStep,
        positions: Tensor,
        cos: Tensor,
        sin: Tensor,
        features: Tensor,
        tapped: list[int],
        entry: Tensor | None = None,
    ) -> Tensor:
        """States [M, h] behind the last layer, from those before the first.

        Args:
            x: [M, h], not changed.
            positions: int64 [M].
            cos, sin: [R, positions, D'], tables of the R rotary embeddings.
            features: [M, taps * h], filled with the states that enter the ``tapped`` layers.
            entry: [M, K], what the first layer's projections take in place of its normed ``x``.
        """
        return torch.ops.eagle_cpu.layers(
            self.stack, x, entry, step.places, positions, step.where, cos, sin, features, tapped
        )


class CpuDecoder:
    """A decoder of transformers, from token ids to the state behind its final norm."""

    def __init__(
        self,
        decoder: nn.Module,
        layers: CpuLayers,
        rotaries: list[str | None],
        max_length: int,
        output: PackedLinear | None,
    ) -> None:
        self._decoder: Any = decoder
        self._layers = layers
        self._rotaries = rotaries
        self._max_length = max_length
        self._cos = self._sin = torch.empty(len(rotaries), 0, 0)  # [R, positions, D']
        self._final: Tensor = decoder.norm.weight.detach()  # type: ignore[union-attr, operator]
        embedding: Any = decoder.embed_tokens
        # Gemma's embedding is scaled, and goes its own way.
        self._whole: Any = None
        self._output = output
        if type(embedding) is nn.Embedding:
            packed = (None, None, 0) if output is None else (output.packed, output.bias, output.out_features)
            self._whole = torch.classes.eagle_cpu.Decoder(
                layers.stack, embedding.weight.detach(), self._final, *packed
            )

    @classmethod
    def of(
        cls, decoder: nn.Module, config: Any, max_length: int, output: PackedLinear | None = None
    ) -> CpuDecoder | None:
        """None for families that it does not know, or layers that are built otherwise than theirs.

        Args:
            max_length: positions there are; some rotary embeddings turn otherwise where there are more.
            output: what tokens can be found with.
        """
        modules: Any = getattr(decoder, "layers", None)
        family = type(modules[0]).__name__.removesuffix("DecoderLayer") if modules else ""
        activation = _ACTIVATIONS.get(
            getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or ""
        )
        if family not in FAMILIES or activation is None:
            return None
        attention = modules[0].self_attn
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        if attention.head_dim % 2 or not all(_fits(module) for module in modules):
            return None
        inner = modules[0].mlp.gate_proj.out_features
        kinds: list[str | None] = [None]
        if family == "Gemma3":
            kinds = [*sorted(set(config.layer_types))]
        weights: list[Tensor] = []
        numbers: list[int] = []
        for module in modules:
            weights += _layer_weights(module, family)
            kind = module.self_attn.layer_type if family == "Gemma3" else None
            numbers += [kinds.index(kind), _window(module.self_attn, config, family) or 0]
        layers = CpuLayers(
            weights=weights,
            kinds=numbers,
            sizes=[heads, kv_heads, attention.head_dim, inner, activation],
            scale=attention.scaling,
            softcap=getattr(config, "attn_logit_softcapping", None) or 0.0,
            eps=config.rms_norm_eps,
            norms=int(family.startswith("Gemma")),
        )
        return cls(decoder, layers, kinds, max_length, output)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        step: RowStep,
        rows: int,
        tapped: tuple[int, ...] = (),
        drawing: Drawing | None = None,
    ) -> tuple[Tensor, Tensor | None, list[int] | None]:
        """Tokens and positions int64 [M] to states [M, h] and, with ``tapped``, features [M, taps * h]; with
        ``drawing`` to the token behind each row too.

        ``rows``: of a slot, which is more than any position.
        """
        final = self._final
        length = min(rows, self._max_length)
        if self._cos.shape[1] < length:
            self._turn_to(length, final)
        if self._whole is not None:
            states, features, drawn = torch.ops.eagle_cpu.decode(
                *(self._whole, tokens, positions, step.places, step.where, self._cos, self._sin, tapped),
                *(drawing is not None, *(drawing or Drawing())),
            )
            return states, features if tapped else None, None if drawing is None else drawn
        x = self._decoder.embed_tokens(tokens)
        features = x.new_empty(len(x), len(tapped) * x.shape[1])
        states = self._layers(x, step, positions, self._cos, self._sin, features, list(tapped))
        states = torch.ops.eagle_cpu.norm(states, final, self._layers.eps, self._layers.norms)
        return states, features if tapped else None, None

    def _turn_to(self, length: int, x: Tensor) -> None:
        """Take the rotary embeddings of positions below ``length`` from the decoder; x gives the dtype."""
        rotary = self._decoder.rotary_emb
        positions = torch.arange(length)[None]
        pairs = [
            rotary(x[None], positions) if kind is None else rotary(x[None], positions, kind)
            for kind in self._rotaries
        ]
        self._cos, self._sin = (torch.cat(tables) for tables in zip(*pairs, strict=True))


def pack_layer(
    projections: list[nn.Linear],
    out: nn.Linear,
    gate: nn.Linear,
    up: nn.Linear,
    down: nn.Linear,
    norms: dict[str, Tensor | None],
    *,
    coarse: bool = False,
) -> list[Tensor]:
    """One layer's tensors in the op's order.

    Args:
        projections: of queries, keys and values.
        coarse: whether matrices are kept in 8 bits.
        norms: gains by name: ``input``, ``query``, ``key``, ``post``, ``mlp``, ``post_mlp``; None or left out
            where there is no such norm.
    """
    pack = torch.ops.eagle_cpu.pack_coarsely if coarse else torch.ops.eagle_cpu.pack
    empty = out.weight.new_empty(0)

    def norm(name: str) -> Tensor:
        gain = norms.get(name)
        return empty if gain is None else gain.detach().to(out.weight.dtype).contiguous()

    biases: list[Tensor] = [p.bias for p in projections if p.bias is not None]
    pairs = torch.stack((gate.weight.unflatten(0, (-1, GATE_RUN)), up.weight.unflatten(0, (-1, GATE_RUN))), 1)
    return [
        norm("input"),
        pack(torch.cat([p.weight for p in projections])),
        torch.cat(biases) if biases else empty,
        norm("query"),
        norm("key"),
        pack(out.weight),
        empty if out.bias is None else out.bias,
        norm("post"),
        norm("mlp"),
        pack(pairs.flatten(0, 2)),
        pack(down.weight),
        norm("post_mlp"),
    ]


def _fits(module: Any) -> bool:
    """Whether the layers within are plain ones, with biases where the op has a place for them."""
    attention, mlp = module.self_attn, module.mlp
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    bare = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    plain = all(map(PackedLinear.fits, [*inputs, attention.o_proj, *bare]))
    even = len({layer.bias is None for layer in inputs}) == 1
    return plain and even and all(m.bias is None for m in bare) and mlp.gate_proj.out_features % GATE_RUN == 0


def _layer_weights(module: Any, family: str) -> list[Tensor]:
    attention, mlp = module.self_attn, module.mlp
    after: Any = module.post_attention_layernorm
    sandwich = hasattr(module, "pre_feedforward_layernorm")
    return pack_layer(
        [attention.q_proj, attention.k_proj, attention.v_proj],
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        {
            "input": module.input_layernorm.weight,
            "query": getattr(getattr(attention, "q_norm", None), "weight", None),
            "key": getattr(getattr(attention, "k_norm", None), "weight", None),
            "post": after.weight if sandwich else None,
            "mlp": module.pre_feedforward_layernorm.weight if sandwich else after.weight,
            "post_mlp": module.post_feedforward_layernorm.weight if sandwich else None,
        },
    )


def _window(attention: Any, config: Any, family: str) -> int | None:
    """As the family's attention passes it on."""
    if family == "Llama":
        return None
    return config.sliding_window if family == "Mistral" else attention.sliding_window
