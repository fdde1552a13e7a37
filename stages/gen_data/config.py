"""What `eagle gen-data` can be told."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from stages.config import CommonConfig
from stages.gen_data.selection_config import SelectionConfig


class GenDataConfig(SelectionConfig, CommonConfig):
    """One field is one flag; the description is its help text."""

    target: str = Field(
        description="The model that answers: Hugging Face id, local folder, .gguf file or builtin:smollm2."
    )
    output: str = Field(description="URI of the conversations to write.")
    max_new_tokens: int = Field(
        default=256, ge=1, description="Longest answer, in tokens; longer ones are cut."
    )
    temperature: float = Field(
        default=0.0, ge=0.0, allow_inf_nan=False, description="Randomness of the answers; 0 is greedy."
    )
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Probability mass of the tokens to choose from; 1 is all of them.",
    )
    seed: int = Field(
        default=0,
        description="Seed of the answers, of which each prompt gets its own, and of the mix of sources.",
    )
    engine: Literal["transformers"] = Field(default="transformers", description="What runs the target.")
    pii: Literal["redact", "off"] = Field(
        default="redact",
        description="What to do with personal data in prompts: replace it by a placeholder such as "
        "<EMAIL_ADDRESS>, or nothing.",
    )
    batch_size: int = Field(default=32, ge=1, description="Conversations answered at the same time.")
    shard_rows: int = Field(
        default=256,
        ge=1,
        description="Conversations in a shard; a stopped run continues behind the last shard.",
    )

    def settings(self) -> dict[str, Any]:
        """The fields that decide the result, apart from the target, which has a fingerprint of its own."""
        return self.model_dump(mode="json", exclude={"target", "output", "device", "dtype", "overwrite"})
