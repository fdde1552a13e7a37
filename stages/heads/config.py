"""What the configs of all kinds of heads have, and what can be chosen of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.errors import EagleError
from stages.targets import logit_scale

HeadKind = Literal["eagle3", "eagle1", "medusa"]
HeadState = Literal["aux", "last"]
"""What a head takes from the target: the states entering three layers, or the one after the final norm."""


@dataclass(frozen=True)
class HeadOptions:
    """What can be chosen of a head beside kind, vocabulary and target. No kind has a use for all of them.

    layers: decoder layers; of Medusa, residual blocks of each head.
    head_dim: width of an attention head; None for the target's.
    sliding_window: positions that a token looks back at, itself included; None for all.
    norm_before_residual, norm_before_fc, fc_norm, norm_output: see ``Eagle3Config``.
    heads: Medusa's heads.
    """

    layers: int = 1
    head_dim: int | None = None
    sliding_window: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    heads: int = 3

    def check(self, kind: HeadKind, used: tuple[str, ...]) -> None:
        """Raises EagleError: an option is set that a head of this kind has no use for."""
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in used and value != option.default:
                raise EagleError(
                    f"{option.name} {value} means nothing to a head of kind {kind}: leave it out, or train a "
                    "head of another kind"
                )


class HeadConfig(BaseModel):
    """What the configs of all kinds have.

    Attributes:
        kind: the kind's name, as on the command line.
        state: what the head takes from the target.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[HeadKind]
    state: ClassVar[HeadState]
    architecture: ClassVar[str]

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    torch_dtype: str = "bfloat16"

    @classmethod
    def read(cls, values: Mapping[str, Any], **named: Any) -> Self:
        """The config with those of ``values`` that it has fields for.

        Raises:
            EagleError: fields are missing or of the wrong type.
        """
        known = {name: values[name] for name in cls.model_fields if name in values}
        try:
            return cls(**(known | named))
        except ValidationError as error:
            wrong = ", ".join(dict.fromkeys(str(item["loc"][0]) for item in error.errors()))
            raise EagleError(f"the head's config.json lacks or has unreadable fields: {wrong}") from None


class TargetSizes:
    """A target's config, read by name: a config of transformers, or the dict of its ``config.json``."""

    def __init__(self, target_config: Any) -> None:
        self._config = target_config

    def __getitem__(self, name: str) -> Any:
        """None where the config has no such field."""
        if isinstance(self._config, Mapping):
            return self._config.get(name)
        return getattr(self._config, name, None)

    def require(self, names: tuple[str, ...]) -> None:
        """Raises EagleError: the config does not name its sizes as Llama's does."""
        if missing := [name for name in names if not self[name]]:
            raise EagleError(
                f"no head can be shaped for a {self['model_type'] or 'such a'} target, its config has no "
                f"{', '.join(missing)}: use a target of another family"
            )

    @property
    def logit_scale(self) -> float:
        """What the target multiplies its logits by."""
        config = self._config
        return logit_scale(SimpleNamespace(**config) if isinstance(config, Mapping) else config)
