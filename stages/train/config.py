"""What `eagle train` can be told."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from stages.config import ArtifactReaderConfig, Bytes, ChatTemplateConfig, CommonConfig
from stages.features.config import FeatureSettings

_ON_THE_FLY = ("conversations", "target", "chat_template", "target_dtype", *FeatureSettings.model_fields)


class TrainConfig(FeatureSettings, ChatTemplateConfig, ArtifactReaderConfig, CommonConfig):
    """Settings of the train stage; the defaults suit a small target and some 100,000 response tokens."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "Learn from": ("features", "conversations"),
        "Head": ("head", "draft_vocab_size", "init"),
        "Training": (
            "epochs",
            "max_steps",
            "batch_tokens",
            "lr",
            "warmup",
            "ttt_steps",
            "ttt_decay",
            "holdout",
            "eval_every",
            "checkpoint_seconds",
            "window_bytes",
            "seed",
        ),
        "Features on the fly": _ON_THE_FLY,
    }

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Number format of matrix products; auto is bfloat16. Weights are trained in float32.",
    )

    features: str | None = Field(default=None, description="URI of the features artifact to learn from.")
    conversations: str | None = Field(
        default=None,
        description="URI of conversations to take features from while training, instead of --features: "
        "no disk, but the target runs in each pass.",
    )
    target: str | None = Field(
        default=None,
        description="The model that answered: Hugging Face id, local folder, .gguf file or builtin:smollm2.",
    )
    target_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="Number format of the target, the --dtype of extract-features; auto is bfloat16.",
    )
    output: str = Field(description="URI of the head artifact to write.")
    head: Literal["eagle3"] = Field(default="eagle3", description="Kind of draft head.")
    draft_vocab_size: int = Field(
        default=0,
        ge=0,
        description="Tokens the head can draft; 0 takes the smallest multiple of 64 that covers 99 % of the "
        "answers, at most 32000.",
    )
    ttt_steps: int = Field(
        default=3, ge=1, le=16, description="Draft steps unrolled in training (training-time test)."
    )
    epochs: int = Field(default=3, ge=1, description="Passes over the training rows.")
    max_steps: int | None = Field(
        default=None,
        ge=1,
        description="Most optimizer steps; the learning rate then falls to its end by this step.",
    )
    batch_tokens: int = Field(default=256, ge=1, description="Supervised tokens an optimizer step, about.")
    lr: float = Field(
        default=1e-3, gt=0, description="Highest learning rate; heads of targets above 1B want 5e-5 to 6e-4."
    )
    warmup: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the steps in which the learning rate rises to its highest.",
    )
    ttt_decay: float = Field(
        default=0.8, gt=0, le=1, description="Weight of each draft step's loss against the step before."
    )
    init: Literal["target", "random"] = Field(
        default="random", description="What the head's final norm and output rows start from."
    )
    holdout: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the conversations kept from training, to measure agreement.",
    )
    eval_every: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps between evaluations on held-out rows; once an epoch if unset.",
    )
    checkpoint_seconds: float = Field(
        default=60, ge=0, description="Least time between checkpoints, from which a killed run continues."
    )
    window_bytes: Bytes | None = Field(
        default=None,
        ge=1,
        description="Bytes of features that are shuffled together, and held at a time. Default: 8 GiB, but "
        "half of the cache at most for remote features, and a quarter of the memory for those on the fly.",
    )
    seed: int = Field(
        default=0, ge=0, description="Seed of the initial weights, the order and the held-out choice."
    )

    @model_validator(mode="after")
    def _one_source(self) -> TrainConfig:
        if self.features is not None:
            for name in _ON_THE_FLY:
                if getattr(self, name) != TrainConfig.model_fields[name].default:
                    raise ValueError(
                        f"{_flag(name)} is for features on the fly, and --features are as they were made: "
                        "leave one of the two out"
                    )
        elif self.conversations is None or self.target is None:
            raise ValueError("give --features, or --conversations and the --target that answered them")
        return self

    @property
    def number_format(self) -> str:
        """`bfloat16` or `float32`."""
        return "bfloat16" if self.dtype == "auto" else self.dtype

    def result_settings(self) -> dict[str, Any]:
        """What decides the head, beside where its rows come from."""
        running = {"features", "output", "overwrite", "device", "dtype", "verify", "checkpoint_seconds"}
        settings = self.model_dump(mode="json", exclude={*running, *_ON_THE_FLY})
        return settings | {"dtype": self.number_format}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
