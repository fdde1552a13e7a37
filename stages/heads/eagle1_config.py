"""The sizes of an EAGLE-1 head, and the ``config.json`` that vLLM reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from stages.heads.config import HeadOptions, TargetSizes
from stages.heads.decoder_config import DecoderHeadConfig, decoder_sizes, read_window

_OPTIONS = ("layers", "head_dim")  # vLLM gives no window to the layers of such a head


class Eagle1Config(DecoderHeadConfig):
    """What fixes the shapes and the maths of an EAGLE-1 head (arXiv 2401.15077); EAGLE-2 uses the same.

    bias: whether ``fc`` has one. EAGLE's first heads have, vLLM loads those without.
    logit_scale: the target's factor of its logits.
    """

    kind = "eagle1"
    state = "last"
    architecture = "EagleLlamaForCausalLM"
    feature_layers: ClassVar[None] = None

    bias: bool = False
    logit_scale: float = 1.0

    @classmethod
    def from_target(
        cls, target_config: Any, draft_vocab_size: int, options: HeadOptions | None = None
    ) -> Eagle1Config:
        """Llama-style layers of the target's own width, heads and RoPE.

        Args:
            target_config: the target's transformers config, or the dict of its ``config.json``.
            draft_vocab_size: number of target tokens the head can propose.

        Raises:
            EagleError: the config does not name its sizes as Llama's does, or an option means nothing here.
        """
        sizes, options = TargetSizes(target_config), options or HeadOptions()
        options.check("eagle1", _OPTIONS)
        return cls(
            **decoder_sizes(sizes, options),
            draft_vocab_size=draft_vocab_size,
            logit_scale=sizes.logit_scale,
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Eagle1Config:
        """Read a head's ``config.json``.

        Raises:
            EagleError: fields are missing or of the wrong type.
        """
        return cls.read(config, sliding_window=read_window(config))

    @property
    def num_parameters(self) -> int:
        """Trained parameters; the frozen copies of the target's embedding and output rows are not counted."""
        h = self.hidden_size
        fc = 2 * h * h + (h if self.bias else 0)
        return fc + self.num_hidden_layers * self.layer_parameters - h  # the first layer has one norm
