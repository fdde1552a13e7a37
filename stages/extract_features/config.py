"""What `eagle extract-features` can be told."""

from __future__ import annotations

from pydantic import Field

from stages.config import CommonConfig


class ExtractFeaturesConfig(CommonConfig):
    """One field is one flag; the description is its help text."""

    target: str = Field(
        description="The model that answered: Hugging Face id, local folder, .gguf file or builtin:smollm2."
    )
    conversations: str = Field(description="URI of the conversations that eagle gen-data wrote.")
    output: str = Field(description="URI of the features to write.")
    max_length: int | None = Field(
        default=None,
        ge=3,
        description="Tokens of a conversation to keep; longer ones are cut. Default: the target's context.",
    )
    batch_tokens: int = Field(
        default=4096, ge=1, description="Tokens in one forward pass of the target, padding included."
    )
    shard_bytes: int = Field(default=512 * 2**20, ge=1, description="Size of a shard of the output, about.")
