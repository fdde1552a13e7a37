"""What `eagle bench` can be told."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from stages.config import ArtifactReaderConfig, ChatTemplateConfig, CommonConfig


class BenchConfig(ChatTemplateConfig, ArtifactReaderConfig, CommonConfig):
    """One field is one flag; the description is its help text."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "Answers": ("num_prompts", "max_new_tokens", "temperature", "seed", "tree"),
        "Losslessness": ("check_float32", "near_tie_gap"),
        "Parity with training": ("parity", "parity_rows", "trained_on"),
    }

    target: str = Field(
        description="The model that answers: Hugging Face id, local folder, .gguf file or builtin:smollm2."
    )
    head: str = Field(description="URI of the draft head that eagle train wrote for this target.")
    prompts: list[str] = Field(
        default_factory=list,
        description="A prompt set: builtin:eval, a local or remote .jsonl or .parquet file, or a Hugging "
        "Face data set id. May be given several times; each is reported by itself, and all pooled.",
    )
    output: str = Field(description="URI of the report to write.")
    max_new_tokens: int = Field(
        default=128, ge=1, description="Longest answer, in tokens; longer ones are cut."
    )
    num_prompts: int | None = Field(
        default=None, ge=1, description="Prompts to take from the start of each set. Default: all there are."
    )
    temperature: float = Field(
        default=0.0, ge=0.0, allow_inf_nan=False, description="Randomness of the answers; 0 is greedy."
    )
    seed: int = Field(default=0, description="Seed of the answers.")
    tree: str = Field(
        default="cost",
        description="Draft tree: cost (what pays on this machine), none, chain:depth=3, "
        "dynamic:depth=6,width=4,nodes=12, best:nodes=12 or static:0,1,0.0.",
    )
    check_float32: int = Field(
        default=4,
        ge=0,
        description="Prompts, spread over all sets, that are answered once more in float32, where both "
        "outputs must be identical; 0 for none.",
    )
    near_tie_gap: float = Field(
        default=0.5,
        ge=0.0,
        allow_inf_nan=False,
        description="In bfloat16 the outputs may part where the float32 logits of the two tokens are less "
        "than this below the highest one.",
    )
    parity: bool = Field(
        default=False,
        description="Instead of answering prompts, replay held-out conversations of the head's training as "
        "they are served, and fail if logits or tokens a step are not those that training predicts.",
    )
    parity_rows: int = Field(default=16, ge=1, description="Conversations to replay, at most.")
    trained_on: str | None = Field(
        default=None,
        description="URI of the features, or conversations, that the head was trained on, if they are no "
        "longer where they were.",
    )

    @model_validator(mode="after")
    def _prompts_or_parity(self) -> BenchConfig:
        if self.parity == bool(self.prompts):
            raise ValueError("give either --prompts to answer, or --parity")
        if self.trained_on is not None and not self.parity:
            raise ValueError("--trained-on is for --parity")
        return self
