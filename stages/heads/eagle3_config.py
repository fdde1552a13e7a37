"""The sizes and switches of an EAGLE-3 head, and the ``config.json`` that vLLM and SGLang read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.heads.config import HeadOptions, TargetSizes
from stages.heads.decoder_config import DecoderHeadConfig, decoder_sizes, read_window
from stages.targets.taps import eagle3_feature_layers

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OPTIONS = ("layers", "head_dim", "sliding_window", *SWITCHES)


class Eagle3Config(DecoderHeadConfig):
    """What fixes the shapes and the maths of an EAGLE-3 head (arXiv 2503.01840, section 3).

    The switches are EAGLE-3.1's and speculators', and mean what they mean to vLLM:

    norm_before_residual: the first layer's residual is the normed feature instead of the feature.
    norm_before_fc: one RMSNorm over the three target states as a whole, before ``fc``.
    fc_norm: an RMSNorm for each of the three, before ``fc``.
    norm_output: the next draft step takes the state after the final norm instead of the one before it.
    """

    kind = "eagle3"
    state = "aux"
    architecture = "LlamaForCausalLMEagle3"

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    feature_layers: tuple[int, int, int] | None = None  # whose inputs are the features; None: EAGLE-3's own

    @classmethod
    def from_target(
        cls,
        target_config: Any,
        draft_vocab_size: int,
        feature_layers: tuple[int, int, int] | None = None,
        options: HeadOptions | None = None,
    ) -> Eagle3Config:
        """Llama-style layers of the target's own width, heads and RoPE.

        Args:
            target_config: the target's transformers config, or the dict of its ``config.json``.
            draft_vocab_size: number of target tokens the head can propose.
            feature_layers: the target's layers whose inputs are the features; None for EAGLE-3's own.

        Raises:
            EagleError: the config does not name its sizes as Llama's does, or an option means nothing here.
        """
        sizes, options = TargetSizes(target_config), options or HeadOptions()
        options.check("eagle3", _OPTIONS)
        return cls(
            **decoder_sizes(sizes, options),
            **{name: getattr(options, name) for name in SWITCHES},
            draft_vocab_size=draft_vocab_size,
            feature_layers=None
            if _is_default(feature_layers, sizes["num_hidden_layers"])
            else feature_layers,
        )

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of the head's folder, every switch that engines default differently spelt out.

        The default feature layers go unnamed, as engines know them. Others are named once for each engine,
        in the field that it reads: vLLM takes the ids as they are, SGLang adds one to its own.
        """
        return super().to_hf() | self._layers_to_hf()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """Read a head's ``config.json``.

        Raises:
            EagleError: it is not an EAGLE-3 head, or one of a variant that this version cannot run.
        """
        return cls.read(config, feature_layers=_layers_from_hf(config), sliding_window=read_window(config))

    def _layers_to_hf(self) -> dict[str, Any]:
        if self.feature_layers is None:
            return {}
        before = [layer - 1 for layer in self.feature_layers]  # their outputs are these layers' inputs
        return {
            LAYER_IDS: list(self.feature_layers),
            "eagle_config": {"use_aux_hidden_state": True, LAYER_IDS: before},
        }

    @property
    def num_parameters(self) -> int:
        """Trained parameters; the frozen copy of the target's embedding is not counted."""
        h, fused = self.hidden_size, 3 * self.target_hidden_size
        wider = (
            self.num_attention_heads + 2 * self.num_key_value_heads
        ) * self.head_dim  # first layer: 2h in
        norms = h + (self.norm_before_fc + self.fc_norm) * fused  # the final one, and those before `fc`
        return (
            fused * h
            + self.num_hidden_layers * self.layer_parameters
            + (wider + 1) * h
            + norms
            + self.draft_vocab_size * h
        )


def _is_default(layers: tuple[int, int, int] | None, num_layers: int) -> bool:
    return layers is None or (num_layers >= 7 and layers == eagle3_feature_layers(num_layers))


def _layers_from_hf(config: Mapping[str, Any]) -> Any:
    if (layers := config.get(LAYER_IDS)) is not None:
        return layers
    before = (config.get("eagle_config") or {}).get(LAYER_IDS)
    return before and [layer + 1 for layer in before]
