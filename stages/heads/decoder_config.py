"""The sizes of heads that are made of decoder layers, and how engines are told of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.errors import EagleError
from stages.heads.config import HeadConfig, HeadOptions, TargetSizes

SLIDING, FULL = "sliding_attention", "full_attention"

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


class DecoderHeadConfig(HeadConfig):
    """Llama-style decoder layers of the target's own width and RoPE.

    ``rope_theta`` and ``rope_scaling`` are those the head is trained *and* served with; they are the
    target's.
    """

    target_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_hidden_layers: int = 1
    sliding_window: int | None = None  # positions that a token looks back at, itself included
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"

    @property
    def attention_parameters(self) -> int:
        """Of the projections of a layer whose input is h wide."""
        return 2 * self.hidden_size * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Of a layer whose input is h wide, its two norms included."""
        h = self.hidden_size
        return self.attention_parameters + 3 * h * self.intermediate_size + 2 * h

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of the head's folder; a window is named where vLLM looks for it."""
        settings = self.model_dump(exclude={"feature_layers"})
        window = settings.pop("sliding_window")
        if window is not None:
            settings |= {
                "sliding_window": window,
                "layer_types": [SLIDING] * self.num_hidden_layers,
                "use_sliding_window": True,
            }
        return {
            "architectures": [self.architecture],
            "model_type": "llama",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            **settings,
        }


def decoder_sizes(sizes: TargetSizes, options: HeadOptions) -> dict[str, Any]:
    """The fields of a ``DecoderHeadConfig`` that follow from the target's config.

    Raises:
        EagleError: the config does not name its sizes as Llama's does.
    """
    sizes.require(_SIZES)
    heads = sizes["num_attention_heads"]
    rope = dict(sizes["rope_parameters"] or sizes["rope_scaling"] or {})
    theta = rope.pop("rope_theta", None) or sizes["rope_theta"] or 10000.0
    if rope.get("rope_type", "default") == "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        rope = {}  # the head turns all of each vector, whatever share the target turns
    return {
        "hidden_size": sizes["hidden_size"],
        "target_hidden_size": sizes["hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": sizes["num_key_value_heads"] or heads,
        "head_dim": options.head_dim or sizes["head_dim"] or sizes["hidden_size"] // heads,
        "intermediate_size": sizes["intermediate_size"],
        "num_hidden_layers": options.layers,
        "sliding_window": options.sliding_window,
        "vocab_size": sizes["vocab_size"],
        "rms_norm_eps": sizes["rms_norm_eps"] or 1e-5,
        "rope_theta": theta,
        "rope_scaling": rope or None,
        "max_position_embeddings": sizes["max_position_embeddings"],
    }


def read_window(config: Mapping[str, Any], where: str = "the head's config.json") -> int | None:
    """The sliding window of all layers, None where they attend to everything.

    As in vLLM, a ``sliding_window`` counts for the layers that ``layer_types`` calls sliding, and for no
    others.

    Raises:
        EagleError: some layers have a window and others have none, or its size is missing.
    """
    kinds = set(config.get("layer_types") or ())
    if not kinds or kinds == {FULL}:
        return None
    window = config.get("sliding_window")
    if kinds != {SLIDING} or not isinstance(window, int):
        raise EagleError(
            f"{where} has layer_types {', '.join(sorted(kinds))} with sliding_window {window}; this version "
            "runs heads whose layers all have the same window, or none"
        )
    return window
