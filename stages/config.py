"""What every stage can be told. One field is one flag, its description the help text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for base, endings in ((1000, ("b",)), (1024, ("", "ib")))
    for ending in endings
}


_LARGEST = 2**63 - 1


def parse_bytes(given: object) -> object:
    """A number of bytes from what a person types: 268435456, 256MiB, 1.5 GB. Anything but text stays.

    Raises:
        ValueError: it is no number with a unit of bytes.
    """
    if not isinstance(given, str):
        return given
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", given.strip().lower())
    if not match or match[2] not in _UNITS:
        raise ValueError("give a number of bytes, such as 268435456, 256MiB or 1.5GB")
    return round(Decimal(match[1]) * _UNITS[match[2]])


def format_bytes(count: int) -> str:
    """`256MiB` for 268435456: what `parse_bytes` reads, in the largest unit of 1024s without a remainder."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if count and not count % _UNITS[unit.lower()]:
            return f"{count // _UNITS[unit.lower()]}{unit}"
    return str(count)


def several(count: int, noun: str) -> str:
    """`1 shard`, `1,800 rows`, `2 processes`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"


def number_list(given: str, wanted: str, *, least: float, most: float = 1e6) -> str:
    """Numbers separated by commas, sorted, each once.

    Raises:
        ValueError: one is no number, or out of range; says what is wanted.
    """
    try:
        numbers = sorted({float(part) for part in given.split(",")})
    except ValueError:
        raise ValueError(wanted) from None
    if not all(least <= number <= most for number in numbers):
        raise ValueError(wanted)
    return ",".join(f"{number:g}" for number in numbers)


@dataclass(frozen=True)
class ByteCount:
    """Marks a field that is a number of bytes. Used by `Bytes`."""


Bytes = Annotated[int, BeforeValidator(parse_bytes), ByteCount()]
"""The type of a field that is a number of bytes: `--shard-bytes 256MiB`."""


@dataclass(frozen=True)
class Positional:
    """Marks a field that is given by its place, without a flag: `eagle inspect URI`.

    Used as `uri: Annotated[str, Positional()] = Field(description=...)`.
    """


class StageConfig(BaseModel):
    """Base of each stage's configuration: frozen, unknown fields refused.

    The command line is generated from these models (`eagle_cli.flags`): field `max_prompts` of gen-data's
    configuration is `--max-prompts` and the environment variable `EAGLE_GEN_DATA_MAX_PROMPTS`.

    Attributes:
        help_groups: headings of `--help` with the fields below each, in this order; those of no group come
            under "Options". A class that inherits from several shows the groups of all of them.

    Raises:
        pydantic.ValidationError: a value is of the wrong type or out of range, or a field is unknown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def _text_is_unicode(cls, given: object) -> object:
        """Neither a tokenizer nor a manifest takes the bytes of a command line that are no UTF-8."""
        for text in given if isinstance(given, list | tuple) else [given]:
            if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
                raise ValueError("is not text in UTF-8")
        return given

    @field_validator("*")
    @classmethod
    def _number_has_64_bits(cls, given: object) -> object:
        """Beyond them Python counts on, and torch, Parquet and the loops of the standard library do not."""
        if isinstance(given, int) and not -_LARGEST <= given <= _LARGEST:
            raise ValueError(f"is too large: at most {_LARGEST}")
        return given

    @field_validator("*", mode="before")
    @classmethod
    def _required_is_not_blank(cls, given: object, info: ValidationInfo) -> object:
        """An empty variable of a shell or a Makefile is a name that was forgotten, not the current folder."""
        field = cls.model_fields[str(info.field_name)]
        if field.is_required() and isinstance(given, str) and not given.strip():
            raise ValueError("must not be empty")
        return given


class ModelConfig(StageConfig):
    """Base of the stages that run a model."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {"Models": ("device", "dtype")}

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where models run; auto is the GPU if there is one."
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Number format of the models; auto is bfloat16."
    )


class ChatTemplateConfig(StageConfig):
    """Base of the stages that load a target whose chat template counts."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {"Models": ("chat_template",)}

    chat_template: str | None = Field(
        default=None,
        description="File, local or remote, with a Jinja chat template instead of the target's own; the same "
        "one for every stage.",
    )


class ArtifactReaderConfig(StageConfig):
    """Base of the stages that read an artifact."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {"Running": ("verify",)}

    verify: Literal["full", "sample", "off"] = Field(
        default="full",
        description="Compare what is read with its digest: every file, one in 16, or none (sizes only).",
    )


class OutputConfig(StageConfig):
    """Base of the stages that write an artifact."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {"Running": ("overwrite",)}

    overwrite: bool = Field(
        default=False,
        description="Replace an artifact at the output instead of leaving it alone or continuing it.",
    )


class JobArrayConfig(StageConfig):
    """Base of the stages whose work can be shared out over a job array."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {"Job arrays": ("shard_index", "num_shards")}

    shard_index: int | None = Field(
        default=None,
        ge=0,
        description="Make only this part of --num-shards, counted from 0: the number of a job in its array.",
    )
    num_shards: int | None = Field(
        default=None,
        ge=1,
        description="Parts that the work is shared out over. Without --shard-index: join the finished parts "
        "to one artifact.",
    )

    @model_validator(mode="after")
    def _index_is_a_part(self) -> Self:
        if self.shard_index is None:
            return self
        if self.num_shards is None:
            raise ValueError("--shard-index needs --num-shards")
        if self.shard_index >= self.num_shards:
            raise ValueError(f"--shard-index {self.shard_index} is not below --num-shards {self.num_shards}")
        return self

    @property
    def part(self) -> tuple[int, int] | None:
        """Index and number of parts; None when the whole is to be made, or the parts joined."""
        if self.shard_index is None or self.num_shards is None:
            return None
        return self.shard_index, self.num_shards

    @property
    def joins(self) -> int | None:
        """How many parts are to be joined; None when something is to be made."""
        return self.num_shards if self.shard_index is None else None


class CommonConfig(ModelConfig, OutputConfig):
    """Base of the stages that run a model and write an artifact."""
