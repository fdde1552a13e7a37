"""What every stage that runs a model can be told. One field is one flag; the description is its help text."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ModelConfig(BaseModel):
    """Base of each stage's configuration: frozen, unknown fields refused, the options of running a model.

    The command line is generated from these models (`eagle_cli.flags`): field `max_prompts` of gen-data's
    configuration is `--max-prompts` and the environment variable `EAGLE_GEN_DATA_MAX_PROMPTS`.

    Raises:
        pydantic.ValidationError: a value is of the wrong type or out of range, or a field is unknown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where models run; auto is the GPU if there is one."
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="Number format of the models; auto is bfloat16."
    )


class CommonConfig(ModelConfig):
    """Base of the stages that write an artifact."""

    overwrite: bool = Field(
        default=False,
        description="Replace an artifact at the output instead of leaving it alone or continuing it.",
    )
