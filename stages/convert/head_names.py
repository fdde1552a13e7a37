"""The names that other projects give the tensors of an EAGLE-3 head, and what their configs say of it.

EAGLE's own repositories and SpecForge name tensors as our head does and often leave out the embeddings; their
config is that of a Llama, with `draft_vocab_size`. speculators has `layers.0.` for `midlayer.`, and in
`transformer_layer_config` the Llama's config without its defaults.

With a draft vocabulary as large as the target's there is no `d2t` and no `t2d`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.errors import EagleError
from stages.heads import Eagle3Config
from stages.targets.taps import eagle3_feature_layers

VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_PREFIXES = ("module.", "draft_model.", "model.")
_COPIES = ("verifier_norm.", "verifier_lm_head.")  # the target's own weights, which some versions keep beside
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def our_name(name: str) -> str | None:
    """What the tensor is called in our head; None for a copy of the target's weights, which it has not."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    if name.startswith(_COPIES):
        return None
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def our_config(raw: Mapping[str, Any], target_layers: int, where: str) -> Eagle3Config:
    """The sizes and the RoPE of a head from its `config.json`.

    Args:
        target_layers: how many the target has.
        where: the file, for messages.

    Raises:
        EagleError: it is another kind of drafter, or a variant of EAGLE-3 that our head does not compute.
    """
    layer = _layer(raw, where)
    for name in VARIANTS:
        if raw.get(name, False):
            raise EagleError(f"{where} sets {name}=true, an EAGLE-3 variant that this version cannot run")
    full = _layer_config(layer, where)
    for name, found, wanted in (
        ("num_hidden_layers", layer.get("num_hidden_layers", 1), 1),
        ("hidden_act", full.hidden_act, "silu"),
    ):
        if found != wanted:
            raise EagleError(f"{where} has {name} {found}; this version runs heads with {wanted}")
    rope = {**(layer.get("rope_scaling") or {}), **(layer.get("rope_parameters") or {})}
    if (share := layer.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))) != 1.0:
        raise EagleError(
            f"{where} has partial_rotary_factor {share}; this version turns the whole of a vector"
        )
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise EagleError(
            f"{where} has layer_types sliding_attention; this version runs heads with full attention"
        )
    layers = _feature_layers(raw, target_layers, where)
    config = Eagle3Config.from_target(full, raw.get("draft_vocab_size") or full.vocab_size, layers)
    rope = {name: value for name, value in (config.rope_scaling or {}).items() if name != "type"}
    kind = rope.get("rope_type", "default")  # `type` is its old name
    if kind not in _ROPE_TYPES:
        raise EagleError(
            f"{where} has RoPE of type {kind}; this version runs heads with {', '.join(_ROPE_TYPES)}"
        )
    width = raw.get("target_hidden_size") or config.hidden_size
    return config.model_copy(update={"target_hidden_size": width, "rope_scaling": rope or None})


def verifier(raw: Mapping[str, Any]) -> str | None:
    """The target that a config names."""
    named = raw.get("speculators_config") or {}
    name = (named.get("verifier") or {}).get("name_or_path")
    return str(name) if name else None


def _layer(raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The part of the config that describes the head's layer."""
    if "speculators_config" not in raw and "speculators_model_type" not in raw:
        if missing := [name for name in _NEEDED if name not in raw]:
            raise EagleError(f"{where} is no config of an EAGLE-3 head, it has no {', '.join(missing)}")
        return raw
    kind = raw.get("speculators_model_type") or (raw.get("speculators_config") or {}).get("algorithm")
    if kind != "eagle3":
        raise EagleError(f"{where} describes a drafter of type {kind}; eagle convert reads eagle3")
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise EagleError(f"{where} has no transformer_layer_config")
    return layer


def _layer_config(layer: Mapping[str, Any], where: str) -> Any:
    """The config of transformers, with the defaults that speculators leaves out."""
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


def _feature_layers(raw: Mapping[str, Any], target_layers: int, where: str) -> tuple[int, int, int] | None:
    """The layers whose inputs the head takes; None for EAGLE-3's own.

    vLLM reads them at the top and counts inputs of layers; SGLang reads `eagle_config` and counts outputs.
    """
    listed = raw.get(_LAYER_IDS)
    if not listed:
        listed = [layer + 1 for layer in (raw.get("eagle_config") or {}).get(_LAYER_IDS) or ()]
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
