"""What `eagle gen-data` can be told."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from stages.config import ChatTemplateConfig, CommonConfig, JobArrayConfig, number_list
from stages.gen_data.privacy.config import PrivacyConfig
from stages.gen_data.selection_config import SelectionConfig

_NOT_IN_RESULT = {
    "chat_template",  # part of the target's fingerprint
    "target",
    "output",
    "device",
    "dtype",
    "overwrite",
    "shard_index",
    "num_shards",
    "dry_run",
    "max_reject_rate",
    "pii_config",  # its content has a digest
    "pii_report",
    "tensor_parallel_size",
    "base_url",
}


class GenDataConfig(SelectionConfig, PrivacyConfig, JobArrayConfig, ChatTemplateConfig, CommonConfig):
    """One field is one flag; the description is its help text."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "Answers": (
            "max_new_tokens",
            "max_model_len",
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "answers_per_prompt",
            "drop_truncated",
        ),
        "Running": (
            "engine",
            "tensor_parallel_size",
            "base_url",
            "served_model",
            "batch_size",
            "shard_rows",
            "dry_run",
        ),
    }

    target: str = Field(
        description="The model that answers: Hugging Face id, local folder, .gguf file or builtin:smollm2."
    )
    output: str = Field(description="URI of the conversations to write.")
    max_new_tokens: int = Field(
        default=256, ge=1, description="Longest answer, in tokens; longer ones are cut."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of a conversation, its answers included. Default: the target's context.",
    )
    temperature: str = Field(
        default="0",
        description="Randomness of the answers; 0 is greedy. Of several, such as 0,1, each prompt gets one: "
        "for heads that draft where answers are sampled too.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Probability mass of the tokens to choose from; 1 is all of them.",
    )
    top_k: int = Field(default=0, ge=0, description="How many tokens to choose from; 0 is all of them.")
    seed: int = Field(
        default=0,
        description="Seed of the answers, of which each prompt gets its own, and of the mix of sources.",
    )
    answers_per_prompt: int = Field(
        default=1, ge=1, description="Conversations made from each prompt; more than one needs --temperature."
    )
    drop_truncated: bool = Field(
        default=False, description="Leave out answers that were cut at --max-new-tokens, and their questions."
    )
    engine: Literal["transformers", "vllm", "openai"] = Field(
        default="transformers",
        description="What runs the target: this process, vLLM, or servers with an OpenAI-compatible API "
        "(--base-url).",
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that share each layer, with vllm.")
    base_url: str | None = Field(
        default=None,
        description="Address of the API for --engine openai, such as http://host:8000/v1. The key, if it "
        "needs one, is taken from OPENAI_API_KEY.",
    )
    served_model: str | None = Field(
        default=None, description="The API's name for the target. Default: the model it has of that name."
    )
    batch_size: int = Field(default=32, ge=1, description="Conversations answered at the same time.")
    shard_rows: int = Field(
        default=256,
        ge=1,
        description="Prompts whose answers make a shard; a stopped run continues behind the last shard.",
    )
    dry_run: bool = Field(
        default=False,
        description="Write nothing: show what would be read, kept and left out, and how long it would take.",
    )

    @model_validator(mode="after")
    def _flags_fit_the_engine(self) -> GenDataConfig:
        if self.engine != "vllm" and self.tensor_parallel_size > 1:
            raise ValueError("--tensor-parallel-size is for --engine vllm")
        if (self.engine == "openai") != (self.base_url is not None):
            raise ValueError("--engine openai and --base-url go together: give both or neither")
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"--base-url {self.base_url} must begin with http:// or https://")
        if self.engine != "openai" and self.served_model is not None:
            raise ValueError("--served-model is for --engine openai")
        return self

    @model_validator(mode="after")
    def _prompts_have_room(self) -> GenDataConfig:
        if self.max_model_len is not None and self.max_model_len <= self.max_new_tokens:
            raise ValueError(
                f"--max-model-len {self.max_model_len} leaves no room for a prompt beside "
                f"--max-new-tokens {self.max_new_tokens}"
            )
        return self

    @field_validator("temperature", mode="before")
    @classmethod
    def _a_number_is_text(cls, given: object) -> object:
        return f"{given:g}" if isinstance(given, int | float) else given

    @field_validator("temperature")
    @classmethod
    def _temperatures(cls, given: str) -> str:
        return number_list(given, "give a number from 0 on, or several with commas, such as 0,1", least=0.0)

    @model_validator(mode="after")
    def _samples_differ(self) -> GenDataConfig:
        if self.temperatures[0] == 0 and self.answers_per_prompt > len(self.temperatures):
            raise ValueError(
                f"--answers-per-prompt {self.answers_per_prompt} with --temperature {self.temperature} would "
                "give the same greedy answer twice: leave out 0, or name more temperatures"
            )
        return self

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Rising."""
        return tuple(float(part) for part in self.temperature.split(","))

    def settings(self) -> dict[str, Any]:
        """The fields that decide the result, apart from the target, which has a fingerprint of its own."""
        settings = self.model_dump(mode="json", exclude=_NOT_IN_RESULT)
        if len(self.temperatures) == 1:  # a number, as artifacts have had it from the start
            settings["temperature"] = self.temperatures[0]
        return settings
