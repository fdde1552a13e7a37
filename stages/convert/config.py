"""What a person can tell `eagle convert`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from stages.config import Bytes, CommonConfig, Positional
from stages.features.config import FeatureSettings, LastStates, LongRows, StorageName

Format = Literal["auto", "speculators-features", "specforge-features", "head"]
Written = Literal["eagle", "speculators"]


class ConvertConfig(CommonConfig):
    """Flags of `eagle convert`: those of "Features" do nothing for a head."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "Features": (
            "dataset",
            "layers",
            "last",
            "last_state",
            "max_reject_rate",
            "storage_dtype",
            "max_length",
            "long_rows",
            "shard_bytes",
        ),
    }

    source: Annotated[str, Positional()] = Field(
        description="Folder or URI of what another tool made: hidden states of speculators "
        "(hs_*.safetensors, data_*.pt) or SpecForge (*.ckpt, *.ckpt.gz), or an EAGLE-3, EAGLE-1 or Medusa "
        "head (config.json with its weights). With --to speculators also a head artifact."
    )
    output: str = Field(description="URI of the features or the head to write.")
    target: str | None = Field(
        default=None,
        description="The model that the source was made for: Hugging Face id, local folder, .gguf file or "
        "builtin:smollm2. Heads of speculators and Medusa name it themselves. With --to speculators, the "
        "name that the folder gives it.",
    )
    format: Format = Field(default="auto", description="What the source is; auto looks at its files.")
    to: Written = Field(
        default="eagle",
        description="Whose format to write a head in: eagle's, which vLLM and SGLang load, or speculators', "
        "for EAGLE-3 heads, whose folder names its target.",
    )
    dataset: str | None = Field(
        default=None,
        description="Folder that speculators' prepare_data.py wrote, which has the loss masks of hs_* files. "
        "Default: SOURCE, or the folder it is in.",
    )
    layers: str | None = Field(
        default=None,
        description="Three layers whose inputs the source has, such as 2,15,27; l is transformers' "
        "output_hidden_states[l]. Default: those that its tool takes when it is not told.",
    )
    last: LastStates = Field(
        default="supervised",
        description="Tokens whose last state is kept: those that EAGLE-3 is taught by, or all, which EAGLE-1 "
        "and Medusa learn from.",
    )
    last_state: Literal["auto", "before-norm", "after-norm"] = Field(
        default="auto",
        description="Whether the last states come from before or after the target's final norm; auto is what "
        "the source's tool does. Checked either way.",
    )
    max_reject_rate: float = Field(
        default=0.05, ge=0, le=1, description="Share of files that may be unusable before the run stops."
    )
    storage_dtype: StorageName = Field(
        default="auto",
        description="Number format of the stored states; auto is --dtype, fp8 takes half of 16 bits.",
    )
    max_length: int | None = Field(
        default=None, ge=3, description="Most tokens of a row. Default: the target's context."
    )
    long_rows: LongRows = Field(
        default="clip",
        description="Longer rows end with the last whole answer that fits, or within their first answer if "
        "none does (clip), or are left out (drop).",
    )
    shard_bytes: Bytes = Field(default=256 * 2**20, ge=1, description="Size of a shard of features, about.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Number format to work in and to write; auto is the source's."
    )

    @field_validator("layers")
    @classmethod
    def _three_ascending_layers(cls, text: str | None) -> str | None:
        return FeatureSettings(layers=text).layers
