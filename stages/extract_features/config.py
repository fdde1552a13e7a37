"""What `eagle extract-features` can be told."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from stages.config import ArtifactReaderConfig, ChatTemplateConfig, CommonConfig, JobArrayConfig
from stages.features.config import FeatureSettings

DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"]


class ExtractFeaturesConfig(
    FeatureSettings, JobArrayConfig, ChatTemplateConfig, ArtifactReaderConfig, CommonConfig
):
    """One field is one flag; the description is its help text."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "Models": ("engine", "device_map", "tensor_parallel_size"),
        "Running": ("estimate",),
    }

    target: str = Field(
        description="The model that answered: Hugging Face id, local folder, .gguf file or builtin:smollm2."
    )
    conversations: str = Field(description="URI of the conversations that eagle gen-data wrote.")
    output: str | None = Field(
        default=None, description="URI of the features to write; not needed with --estimate."
    )
    engine: Literal["transformers", "vllm"] = Field(
        default="transformers",
        description="What runs the target; vllm shares each layer among GPUs (--tensor-parallel-size).",
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs that share each layer, with vllm.")
    device_map: DeviceMap | None = Field(
        default=None,
        description="Spread the target over all GPUs, and over main memory what they cannot hold, by "
        "accelerate.",
    )
    estimate: bool = Field(
        default=False,
        description="Print rows, tokens, bytes, shards and time, after trying a few batches; write nothing.",
    )

    @model_validator(mode="after")
    def _flags_go_together(self) -> Self:
        if self.output is None and not self.estimate:
            raise ValueError("--output is missing: give the URI of the features to write, or --estimate")
        if self.device_map is not None and self.device == "cpu":
            raise ValueError("--device-map spreads a target over GPUs: leave out --device cpu")
        if self.engine == "vllm" and self.device_map is not None:
            raise ValueError("--device-map is for --engine transformers: vllm has --tensor-parallel-size")
        if self.engine == "transformers" and self.tensor_parallel_size > 1:
            raise ValueError("--tensor-parallel-size is for --engine vllm: transformers has --device-map")
        return self
