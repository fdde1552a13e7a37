"""What `eagle gen-data` can be told about where prompts come from and which are taken."""

from __future__ import annotations

from pydantic import BaseModel, Field


class SelectionConfig(BaseModel):
    """One field is one flag; the description is its help text."""

    prompts: list[str] = Field(
        min_length=1,
        description="Where prompts come from, may be given several times: a local or remote file (.jsonl, "
        ".json, .parquet, .csv, also compressed), a pattern, a Hugging Face data set as id, id:config or "
        "id:config:split, or builtin:chat. The sources take turns; with SRC=weight they are drawn by weight.",
    )
    max_prompts: int | None = Field(
        default=None, ge=1, description="Most prompts to answer. Default: all there are."
    )
    prompt_field: str | None = Field(
        default=None, description="Field of a row to read the prompt from, instead of the known ones."
    )
    shuffle_buffer: int = Field(
        default=10_000,
        ge=0,
        description="Rows of a source among which the next one is drawn by --seed; 0 keeps a source's order. "
        "Built-in prompts are mixed already and stay in order.",
    )
    max_reject_rate: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Highest share of rows that are no prompts; more stop the stage, with examples.",
    )
    source_license: list[str] = Field(
        default=[],
        description="Licence of the prompts of a source, as SRC=LICENCE, for rows that name none. May be "
        "given several times.",
    )
    system_prompt: str | None = Field(
        default=None,
        description="System message for every conversation instead of the source's; '' for none.",
    )
    system_prompt_file: str | None = Field(
        default=None, description="File, local or remote, with the text for --system-prompt."
    )
    near_duplicates: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Similarity (Jaccard, of runs of five characters of what users say) from which a prompt "
        "counts as asked before; 1 leaves out equal prompts only.",
    )
    exclude: list[str] = Field(
        default=[],
        description="Prompts that must not be answered, such as a benchmark's, given as for --prompts: those "
        "that contain most of one of them are left out. May be given several times.",
    )
