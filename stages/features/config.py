"""What shapes features, wherever they are taken: extracted once, or on the fly while a head trains."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from stages.config import Bytes, StageConfig

StorageName = Literal["auto", "bfloat16", "float16", "float32", "fp8"]
LongRows = Literal["clip", "drop"]
LastStates = Literal["supervised", "all"]


class FeatureSettings(StageConfig):
    """Flags of `eagle extract-features` and of `eagle train --conversations`, with the same meaning in both.

    The same values, target and conversations give the same features, bit for bit.
    """

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "Features": (
            "layers",
            "last",
            "storage_dtype",
            "max_tokens",
            "max_length",
            "long_rows",
            "forward_tokens",
            "shard_bytes",
        ),
    }

    layers: str | None = Field(
        default=None,
        description="Three layers whose inputs are the features, such as 2,15,27; l is transformers' "
        "output_hidden_states[l]. Default, as EAGLE-3: 2, L//2 and L-3 of L layers.",
    )
    last: LastStates = Field(
        default="supervised",
        description="Tokens whose state after the final norm is kept: those that EAGLE-3 is taught by, or "
        "all, which EAGLE-1 and Medusa learn from.",
    )
    storage_dtype: StorageName = Field(
        default="auto",
        description="Number format of the stored states; auto is that of the target, fp8 takes half the room "
        "of 16 bits.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of features; conversations are taken in order until one does not fit.",
    )
    max_length: int | None = Field(
        default=None, ge=3, description="Most tokens of a conversation. Default: the target's context."
    )
    long_rows: LongRows = Field(
        default="clip",
        description="Longer conversations end with the last whole answer that fits, or within their first "
        "answer if none does (clip), or are left out (drop).",
    )
    forward_tokens: int = Field(
        default=4096, ge=1, description="Tokens in one forward pass of the target, padding included."
    )
    shard_bytes: Bytes = Field(
        default=256 * 2**20,
        ge=1,
        description="Size of a shard, about; a run that is killed loses at most one that it works on.",
    )

    @field_validator("layers")
    @classmethod
    def _three_ascending_layers(cls, text: str | None) -> str | None:
        if text is None:
            return None
        if not re.fullmatch(r"\s*\d+\s*,\s*\d+\s*,\s*\d+\s*", text):
            raise ValueError("give three layer numbers with commas between, such as 2,15,27")
        low, mid, high = parse_layers(text)
        if not low < mid < high:
            raise ValueError("the three layers must be distinct and ascending: low, mid, high")
        return f"{low},{mid},{high}"


def parse_layers(text: str) -> tuple[int, int, int]:
    """`2,15,27` as numbers; `FeatureSettings` has checked the form."""
    low, mid, high = (int(part) for part in text.split(","))
    return low, mid, high
