"""What `eagle inspect` can be told."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from stages.config import Positional, StageConfig


class InspectConfig(StageConfig):
    """One field is one flag; the description is its help text."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "Rows": ("rows", "row_start", "row", "target"),
        "Checks": ("verify",),
    }

    uri: Annotated[str, Positional()] = Field(
        min_length=1, description="The artifact's folder, at a local path or a URI; an unfinished one too."
    )
    rows: int = Field(
        default=0,
        ge=0,
        description="Show so many rows: conversations and features as text in which the tokens that the "
        "target sampled are coloured, features with the norms of their states too; lines of a head's "
        "training log; the table and requests of a report.",
    )
    row_start: int = Field(default=0, ge=0, description="The first row to show, counted from 0.")
    row: str | None = Field(
        default=None, description="Show the row of this id: of a conversation, or its number in features."
    )
    target: str | None = Field(
        default=None,
        description="Whose tokenizer decodes conversations. Default: the target that the artifact names.",
    )
    verify: bool = Field(
        default=False,
        description="Read every file again and compare it with its digest; exit code 1 if one differs.",
    )
