"""The sizes of Medusa heads, and the ``config.json`` that vLLM reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from stages.heads.config import HeadConfig, HeadOptions, TargetSizes

_OPTIONS = ("layers", "heads")


class MedusaConfig(HeadConfig):
    """What fixes the shapes and the maths of Medusa heads (arXiv 2401.10774).

    heads: K; head k (from 0) predicts the token k+2 ahead of the one whose state it is given.
    layers: residual blocks of each head.
    bias: whether their linear layers have one.
    shared_output: all heads go through the target's own output layer. Medusa's published heads have one each,
        which makes them several times as large as a head should be; they can be served, and not trained here.
    logit_scale: the target's factor of its logits.
    """

    kind = "medusa"
    state = "last"
    architecture = "MedusaModel"
    feature_layers: ClassVar[None] = None

    heads: int = 3
    layers: int = 1
    bias: bool = True
    shared_output: bool = True
    logit_scale: float = 1.0

    @classmethod
    def from_target(
        cls, target_config: Any, draft_vocab_size: int, options: HeadOptions | None = None
    ) -> MedusaConfig:
        """Args:
            target_config: the target's transformers config, or the dict of its ``config.json``.
            draft_vocab_size: number of target tokens the heads can propose.

        Raises:
            EagleError: the config does not name its sizes as Llama's does, or an option means nothing here.
        """
        sizes, options = TargetSizes(target_config), options or HeadOptions()
        sizes.require(("hidden_size", "vocab_size"))
        options.check("medusa", _OPTIONS)
        return cls(
            hidden_size=sizes["hidden_size"],
            vocab_size=sizes["vocab_size"],
            draft_vocab_size=draft_vocab_size,
            heads=options.heads,
            layers=options.layers,
            logit_scale=sizes.logit_scale,
        )

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of the head's folder.

        vLLM 0.32 cannot load a reduced vocabulary of Medusa heads, so its fields tell of the whole one; ours
        is beside (see ``stages.heads.checkpoint``). It takes any field with "num" and "heads" in its name for
        the number of heads, so there is only one.
        """
        return {
            "architectures": [self.architecture],
            "model_type": "medusa",
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "truncated_vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "num_heads": self.heads,
            "num_hidden_layers": self.layers,
            "medusa_fc_bias": self.bias,
            "original_lm_head": self.shared_output,
            "logit_scale": self.logit_scale,
            "torch_dtype": self.torch_dtype,
        }

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> MedusaConfig:
        """Read a head's ``config.json``.

        Raises:
            EagleError: fields are missing or of the wrong type.
        """
        ours = {
            "heads": "num_heads",
            "layers": "num_hidden_layers",
            "bias": "medusa_fc_bias",
            "shared_output": "original_lm_head",
        }
        return cls.read(config, **{name: config.get(theirs) for name, theirs in ours.items()})

    @property
    def num_parameters(self) -> int:
        """Trained parameters; the frozen copy of the target's output rows is not counted."""
        h = self.hidden_size
        blocks = self.heads * self.layers * h * (h + self.bias)
        return blocks if self.shared_output else blocks + self.heads * self.draft_vocab_size * h
