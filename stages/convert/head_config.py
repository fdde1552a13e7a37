"""What the configs of other projects say of a head.

EAGLE's own repositories and SpecForge have the config of a Llama, with `draft_vocab_size` for EAGLE-3.
speculators has the Llama's config without its defaults in `transformer_layer_config`. Medusa's says little,
and not always truly: its sizes are those of the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stages.convert.head_names import is_speculators
from stages.errors import EagleError
from stages.heads import Eagle1Config, Eagle3Config, HeadOptions, MedusaConfig
from stages.heads.decoder_config import read_window
from stages.heads.eagle3_config import LAYER_IDS, SWITCHES
from stages.targets import logit_scale
from stages.targets.taps import eagle3_feature_layers

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")


def eagle3_config(raw: Mapping[str, Any], target_layers: int, where: str) -> Eagle3Config:
    """The sizes, switches and RoPE of an EAGLE-3 head from its `config.json`.

    Args:
        target_layers: how many the target has.
        where: the file, for messages.

    Raises:
        EagleError: it is a variant that our head does not compute.
    """
    layer, full = _layer(raw, where)
    inner = raw.get("eagle_config") or {}
    switches = {name: bool(inner.get(name, raw.get(name, False))) for name in SWITCHES}
    config = Eagle3Config.from_target(
        full,
        raw.get("draft_vocab_size") or full.vocab_size,
        _feature_layers(raw, target_layers, where),
        _options(layer, where, **switches),
    )
    width = raw.get("target_hidden_size") or config.hidden_size
    rope = _rope(config.rope_scaling, where)
    return config.model_copy(update={"target_hidden_size": width, "rope_scaling": rope})


def eagle1_config(raw: Mapping[str, Any], target_config: Any, bias: bool, where: str) -> Eagle1Config:
    """The sizes and RoPE of an EAGLE-1 head from its `config.json`; it drafts the target's whole vocabulary.

    Args:
        bias: whether `fc` has one.
        where: the file, for messages.

    Raises:
        EagleError: it is a variant that our head does not compute.
    """
    layer, full = _layer(raw, where)
    config = Eagle1Config.from_target(full, full.vocab_size, _options(layer, where))
    rope = _rope(config.rope_scaling, where)
    changes = {"bias": bias, "rope_scaling": rope, "logit_scale": logit_scale(target_config)}
    return config.model_copy(update=changes)


def medusa_config(
    tensors: Mapping[str, Tensor], target_config: Any, draft_vocab_size: int, where: str
) -> MedusaConfig:
    """The sizes of Medusa heads, from tensors under our names.

    Raises:
        EagleError: there is no block among them.
    """
    blocks = [match for match in map(_BLOCK.fullmatch, tensors) if match]
    if not blocks:
        raise EagleError(f"{where} has no residual block of a Medusa head: fetch the heads again")
    return MedusaConfig(
        hidden_size=tensors[blocks[0].string].shape[-1],
        vocab_size=target_config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        heads=1 + max(int(match[1]) for match in blocks),
        layers=1 + max(int(match[2]) for match in blocks),
        bias=any(match[3] == "bias" for match in blocks),
        shared_output=not any(name.startswith("lm_heads.") for name in tensors),
        logit_scale=logit_scale(target_config),
    )


def verifier(raw: Mapping[str, Any]) -> str | None:
    """The target that a config names."""
    named = raw.get("speculators_config") or {}
    name = (named.get("verifier") or {}).get("name_or_path") or raw.get("base_model_name_or_path")
    return str(name) if name else None


def _layer(raw: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], Any]:
    """What the config says of the head's layers, and the same with the defaults that it leaves out."""
    layer = raw.get("transformer_layer_config") if is_speculators(raw) else raw
    if not isinstance(layer, Mapping):
        raise EagleError(f"{where} has no transformer_layer_config")
    if layer is raw and (missing := [name for name in _NEEDED if name not in raw]):
        raise EagleError(f"{where} is no config of a draft head, it has no {', '.join(missing)}")
    full = _layer_config(layer, where)
    if full.hidden_act != "silu":
        raise EagleError(f"{where} has hidden_act {full.hidden_act}; this version runs heads with silu")
    return layer, full


def _layer_config(layer: Mapping[str, Any], where: str) -> Any:
    """The config of transformers."""
    from transformers import LlamaConfig, Qwen3Config

    classes = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    kind = layer.get("model_type", "llama")
    if kind not in classes:
        raise EagleError(
            f"{where} has model_type {kind}; eagle convert reads heads of {' and '.join(classes)}"
        )
    try:
        return classes[kind](**{name: value for name, value in layer.items() if name != "model_type"})
    except Exception as error:  # transformers' checks have no common base
        raise EagleError(f"{where} cannot be read: {' '.join(str(error).split())[:200]}") from None


def _options(layer: Mapping[str, Any], where: str, **switches: bool) -> HeadOptions:
    rope = {**(layer.get("rope_scaling") or {}), **(layer.get("rope_parameters") or {})}
    if (share := layer.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))) != 1.0:
        raise EagleError(
            f"{where} has partial_rotary_factor {share}; this version turns the whole of a vector"
        )
    layers = layer.get("num_hidden_layers", 1)
    if not isinstance(layers, int) or layers < 1:
        raise EagleError(f"{where} has num_hidden_layers {layers}; a head has at least one")
    return HeadOptions(layers=layers, sliding_window=read_window(layer, where), **switches)


def _rope(scaling: Mapping[str, Any] | None, where: str) -> dict[str, Any] | None:
    rope = {name: value for name, value in (scaling or {}).items() if name != "type"}
    kind = rope.get("rope_type", "default")  # `type` is its old name
    if kind not in _ROPE_TYPES:
        raise EagleError(
            f"{where} has RoPE of type {kind}; this version runs heads with {', '.join(_ROPE_TYPES)}"
        )
    return rope or None


def _feature_layers(raw: Mapping[str, Any], target_layers: int, where: str) -> tuple[int, int, int] | None:
    """The layers whose inputs the head takes; None for EAGLE-3's own.

    vLLM reads them at the top and counts inputs of layers; SGLang reads `eagle_config` and counts outputs.
    """
    listed = raw.get(LAYER_IDS)
    if not listed:
        listed = [layer + 1 for layer in (raw.get("eagle_config") or {}).get(LAYER_IDS) or ()]
    if not listed:
        return None
    if len(listed) != 3 or not 0 < listed[0] < listed[1] < listed[2] < target_layers:
        raise EagleError(
            f"{where} takes features at layers {list(listed)}; this version runs heads with three, ascending "
            f"and between 1 and {target_layers - 1} for a target of {target_layers} layers"
        )
    low, mid, high = listed
    layers = (low, mid, high)
    default = target_layers >= 7 and layers == eagle3_feature_layers(target_layers)
    return None if default else layers
