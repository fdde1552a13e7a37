"""The sizes of an EAGLE-3 head, and the ``config.json`` that vLLM and SGLang read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.errors import EagleError
from stages.targets.taps import eagle3_feature_layers

ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


_SIZES = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


class Eagle3Config(BaseModel):
    """What fixes the shapes and the maths of an EAGLE-3 head (arXiv 2503.01840, section 3).

    ``rope_theta`` and ``rope_scaling`` are those the head is trained *and* served with; they are the
    target's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int
    target_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    torch_dtype: str = "bfloat16"
    feature_layers: tuple[int, int, int] | None = None  # whose inputs are the features; None: EAGLE-3's own

    @classmethod
    def from_target(
        cls,
        target_config: Any,
        draft_vocab_size: int,
        feature_layers: tuple[int, int, int] | None = None,
    ) -> Eagle3Config:
        """One Llama-style layer of the target's own width, heads and RoPE.

        Args:
            target_config: the target's transformers config, or the dict of its ``config.json``.
            draft_vocab_size: number of target tokens the head can propose.
            feature_layers: the target's layers whose inputs are the features; None for EAGLE-3's own.

        Raises:
            EagleError: the config does not name its sizes as Llama's does.
        """
        read: Callable[[str], Any] = (
            target_config.get if isinstance(target_config, Mapping) else _attribute_reader(target_config)
        )
        if missing := [name for name in _SIZES if not read(name)]:
            raise EagleError(
                f"no head can be shaped for a {read('model_type') or 'such a'} target, its config has no "
                f"{', '.join(missing)}: use a target of another family"
            )
        heads = read("num_attention_heads")
        rope = dict(read("rope_parameters") or read("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or read("rope_theta") or 10000.0
        if rope.get("rope_type", "default") == "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            rope = {}  # the head turns all of each vector, whatever share the target turns
        return cls(
            hidden_size=read("hidden_size"),
            target_hidden_size=read("hidden_size"),
            num_attention_heads=heads,
            num_key_value_heads=read("num_key_value_heads") or heads,
            head_dim=read("head_dim") or read("hidden_size") // heads,
            intermediate_size=read("intermediate_size"),
            vocab_size=read("vocab_size"),
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=read("rms_norm_eps") or 1e-5,
            rope_theta=theta,
            rope_scaling=rope or None,
            max_position_embeddings=read("max_position_embeddings"),
            feature_layers=None if _is_default(feature_layers, read("num_hidden_layers")) else feature_layers,
        )

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of the head's folder, every switch that engines default differently spelt out.

        The default feature layers go unnamed, as engines know them. Others are named once for each engine,
        in the field that it reads: vLLM takes the ids as they are, SGLang adds one to its own.
        """
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            **self.model_dump(exclude={"feature_layers"}),
            **self._layers_to_hf(),
        }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """Read a head's ``config.json``.

        Raises:
            EagleError: it is not an EAGLE-3 head, or one of a variant that this version cannot run.
        """
        if config.get("architectures") != [ARCHITECTURE]:
            raise EagleError(
                f"head architecture {config.get('architectures')} is not supported; expected {ARCHITECTURE}"
            )
        for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            if config.get(switch, False):
                raise EagleError(f"the head sets {switch}=true, an EAGLE-3 variant this version cannot run")
        if config.get("num_hidden_layers", 1) != 1:
            raise EagleError(
                f"the head has {config['num_hidden_layers']} layers; this version runs heads of one"
            )
        try:
            return cls(
                **{name: config[name] for name in cls.model_fields if name in config},
                feature_layers=_layers_from_hf(config),
            )
        except ValidationError as error:
            fields = ", ".join(str(item["loc"][0]) for item in error.errors())
            raise EagleError(f"the head's config.json lacks or has unreadable fields: {fields}") from None

    def _layers_to_hf(self) -> dict[str, Any]:
        if self.feature_layers is None:
            return {}
        before = [layer - 1 for layer in self.feature_layers]  # their outputs are these layers' inputs
        return {
            _LAYER_IDS: list(self.feature_layers),
            "eagle_config": {"use_aux_hidden_state": True, _LAYER_IDS: before},
        }

    @property
    def num_parameters(self) -> int:
        """Trained parameters; the frozen copy of the target's embedding is not counted."""
        h, q = self.hidden_size, self.num_attention_heads * self.head_dim
        kv = self.num_key_value_heads * self.head_dim
        attention = 2 * h * (q + 2 * kv) + q * h
        return (
            3 * self.target_hidden_size * h
            + attention
            + 3 * h * self.intermediate_size
            + (4 + self.draft_vocab_size) * h
        )


def _is_default(layers: tuple[int, int, int] | None, num_layers: int) -> bool:
    return layers is None or (num_layers >= 7 and layers == eagle3_feature_layers(num_layers))


def _layers_from_hf(config: Mapping[str, Any]) -> Any:
    if (layers := config.get(_LAYER_IDS)) is not None:
        return layers
    before = (config.get("eagle_config") or {}).get(_LAYER_IDS)
    return before and [layer + 1 for layer in before]


def _attribute_reader(config: Any) -> Callable[[str], Any]:
    return lambda name: getattr(config, name, None)
