"""EAGLE-3 heads in the format of speculators, which vLLM serves by the folder alone: it names the target.

The first layer is `layers.0` there, and the config has the layers' own in `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.errors import EagleError
from stages.heads.decoder_config import DecoderHeadConfig
from stages.heads.eagle3_config import LAYER_IDS, SWITCHES, Eagle3Config

ARCHITECTURE = "Eagle3Speculator"
VERSION = "0.7.0"
"""The release of speculators whose format this is."""

SPECULATIVE_TOKENS = 3
"""What the config proposes to draft at a time; engines can be told otherwise."""

_OURS, _THEIRS = "midlayer.", "layers.0."
_LAYERS = set(DecoderHeadConfig.model_fields) - {"draft_vocab_size", "target_hidden_size", "rope_theta"}


def speculators_config(
    config: Eagle3Config, target: str, target_architectures: Sequence[str]
) -> dict[str, Any]:
    """The ``config.json`` of a head in speculators' format.

    Args:
        target: hub id or folder of the target, as whoever serves the head can find it.
    """
    hf = config.to_hf()
    layer = {name: hf[name] for name in (*_LAYERS, "layer_types", "use_sliding_window") if name in hf}
    scaling = layer.pop("rope_scaling") or {"rope_type": "default"}
    layers = config.feature_layers
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}],
            "verifier": {"name_or_path": target, "architectures": list(target_architectures)},
        },
        "transformer_layer_config": {
            "model_type": "llama",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "rope_parameters": {"rope_theta": config.rope_theta, **scaling},
            **layer,
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "torch_dtype": config.torch_dtype,
        LAYER_IDS: None if layers is None else list(layers),
        **{name: getattr(config, name) for name in SWITCHES},
    }


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a head's ``config.json`` is in speculators' format."""
    return "speculators_model_type" in config


def read_speculators(config: Mapping[str, Any]) -> Eagle3Config:
    """The config of a head that was written in speculators' format.

    Raises:
        EagleError: it is of another kind, or fields are missing or of the wrong type.
    """
    layer = config.get("transformer_layer_config")
    if config.get("speculators_model_type") != "eagle3" or not isinstance(layer, Mapping):
        raise EagleError(
            f"the head is a speculator of type {config.get('speculators_model_type')}; this version runs "
            "eagle3"
        )
    rope = dict(layer.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None)
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    ours = {name: value for name, value in config.items() if value is not None}
    return Eagle3Config.from_hf({**layer, **ours, "rope_theta": theta, "rope_scaling": scaling})


def to_speculators(name: str) -> str:
    """What speculators calls a tensor of ours."""
    return name.replace(_OURS, _THEIRS, 1) if name.startswith(_OURS) else name


def from_speculators(name: str) -> str:
    """What we call a tensor of speculators'."""
    return name.replace(_THEIRS, _OURS, 1) if name.startswith(_THEIRS) else name
