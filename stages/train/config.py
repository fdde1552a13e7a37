"""What `eagle train` can be told."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from stages.config import ArtifactReaderConfig, Bytes, ChatTemplateConfig, CommonConfig
from stages.features.config import FeatureSettings

LossKind = Literal["cross-entropy", "kl", "lk", "lk-log"]
OptimizerKind = Literal["adamw", "muon"]
Schedule = Literal["cosine", "constant", "wsd"]
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]

_ON_THE_FLY = ("conversations", "chat_template", "target_dtype", *FeatureSettings.model_fields)

RUNNING = (
    "features",
    "output",
    "overwrite",
    "device",
    "dtype",
    "verify",
    "checkpoint_seconds",
    "keep_last",
    "micro_batch_tokens",
    "recompute",
    "shard",
    "target",
    "track",
    "parity_rows",
)
"""Fields that decide how a head is made and not which; a run continues with others."""


class TrainConfig(FeatureSettings, ChatTemplateConfig, ArtifactReaderConfig, CommonConfig):
    """Settings of the train stage; the defaults suit a small target and some 100,000 response tokens."""

    help_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "Learn from": ("features", "conversations", "target"),
        "Head": (
            "head",
            "head_layers",
            "head_dim",
            "draft_vocab_size",
            "sliding_window",
            "fc_norm",
            "norm_output",
            "norm_before_fc",
            "norm_before_residual",
            "init",
            "init_from",
        ),
        "Training": (
            "epochs",
            "max_steps",
            "batch_tokens",
            "micro_batch_tokens",
            "recompute",
            "shard",
            "optimizer",
            "lr",
            "warmup",
            "schedule",
            "weight_decay",
            "loss",
            "ttt_steps",
            "ttt_decay",
            "window_bytes",
            "seed",
        ),
        "Measuring": ("holdout", "eval_every", "eval_steps", "patience", "parity_rows", "track"),
        "Features on the fly": _ON_THE_FLY,
        "Running": ("checkpoint_seconds", "keep_last"),
    }

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description="Number format of matrix products; auto is bfloat16. Weights are trained in float32.",
    )

    features: list[str] = Field(
        default_factory=list,
        description="URI of features to learn from. May be given several times: the rows of all are mixed.",
    )
    conversations: str | None = Field(
        default=None,
        description="URI of conversations to take features from while training, instead of --features: "
        "no disk, but the target runs in each pass.",
    )
    target: str | None = Field(
        default=None,
        description="The model that answered: Hugging Face id, local folder, .gguf file or builtin:smollm2. "
        "With --features only --init (auto, layer) and the parity check at the end use it, by default where "
        "the features say that it is.",
    )
    target_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto",
        description="Number format of the target, the --dtype of extract-features; auto is bfloat16.",
    )
    output: str = Field(description="URI of the head artifact to write.")
    head: Literal["eagle3", "eagle1", "medusa"] = Field(default="eagle3", description="Kind of draft head.")
    head_layers: int = Field(default=1, ge=1, le=8, description="Decoder layers of the head.")
    head_dim: int | None = Field(
        default=None, ge=2, multiple_of=2, description="Width of its attention heads; the target's if unset."
    )
    draft_vocab_size: int = Field(
        default=0,
        ge=0,
        description="Tokens the head can draft; 0 takes the smallest multiple of 64 that covers 99 % of the "
        "answers, at most 32000, or with --init-from the tokens of that head.",
    )
    sliding_window: int | None = Field(
        default=None, ge=1, description="Keys that the head's attention looks back at, at most; all if unset."
    )
    fc_norm: bool = Field(
        default=False, description="EAGLE-3.1: norm each of the three target states before they are fused."
    )
    norm_output: bool = Field(
        default=False, description="EAGLE-3.1: norm the state that the next draft step takes."
    )
    norm_before_fc: bool = Field(default=False, description="Norm the three target states as one.")
    norm_before_residual: bool = Field(
        default=False, description="Take the normed feature as the residual of the head's layer."
    )
    ttt_steps: int = Field(
        default=3,
        ge=1,
        le=16,
        description="Draft steps unrolled in training (training-time test); Medusa's heads.",
    )
    epochs: int = Field(default=4, ge=1, description="Passes over the training rows.")
    max_steps: int | None = Field(
        default=None,
        ge=1,
        description="Most optimizer steps; the learning rate then falls to its end by this step.",
    )
    batch_tokens: int = Field(
        default=1024, ge=1, description="Supervised tokens an optimizer step, about, of all processes."
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most supervised tokens on a device at a time, about: gradients of several add up to a "
        "step. Unset: the whole step at once.",
    )
    recompute: bool = Field(
        default=False,
        description="Compute the head's layers again in the backward pass instead of keeping what they made: "
        "less memory, more time.",
    )
    shard: bool = Field(
        default=False,
        description="Each of several processes keeps its part of weights, gradients and optimizer state "
        "only: for heads that are too large for one device.",
    )
    optimizer: Literal["auto", "adamw", "muon"] = Field(
        default="auto",
        description="What takes the steps: AdamW, or Muon on the matrices between features and last state "
        "and AdamW on the rest; auto is muon.",
    )
    lr: float = Field(
        default=1e-3, gt=0, description="Highest learning rate; heads of targets above 1B want 5e-5 to 6e-4."
    )
    warmup: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="Share of the steps in which the learning rate rises to its highest.",
    )
    schedule: Schedule = Field(
        default="cosine",
        description="How the learning rate goes on: it falls to 0 as a cosine, stays, or stays and falls "
        "to 0 in a line over the last fifth (wsd).",
    )
    weight_decay: float = Field(default=0.1, ge=0, description="Of matrices; norms are left out.")
    loss: LossKind = Field(
        default="cross-entropy",
        description="What the head is taught: the target's distribution (cross-entropy, or kl, the same with "
        "its best at 0), or the share of it that speculative sampling accepts (lk with the help of KL, "
        "lk-log its logarithm).",
    )
    ttt_decay: float = Field(
        default=0.8, gt=0, le=1, description="Weight of each draft step's loss against the step before."
    )
    init: Literal["auto", "random", "target", "layer"] = Field(
        default="auto",
        description="What the head starts from: random numbers, the target's final norm and output rows, or "
        "those and the target's last layer (EAGLE-3). auto is layer for EAGLE-3 where the target is given, "
        "built in or a local path and its layers are of a kind that fits, else random.",
    )
    init_from: str | None = Field(
        default=None,
        description="URI of a head artifact of the same shape and target to start from; eagle convert makes "
        "one of other tools' heads.",
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
    eval_steps: int | None = Field(
        default=None,
        ge=1,
        le=16,
        description="Draft steps measured on held-out rows; as many as are trained if unset.",
    )
    patience: int | None = Field(
        default=None,
        ge=1,
        description="End training after so many evaluations in a row without more tokens per step.",
    )
    parity_rows: int = Field(
        default=8,
        ge=0,
        description="Held-out conversations that the finished head decodes, at most, to confirm what "
        "training predicts; 0 for none. Without --target only if the target is built in or a local path.",
    )
    track: Tracker | None = Field(
        default=None, description="Send the measures to this tracker too, as they are taken."
    )
    checkpoint_seconds: float = Field(
        default=60, ge=0, description="Least time between checkpoints, from which a killed run continues."
    )
    keep_last: int = Field(
        default=1,
        ge=1,
        le=100,
        description="Checkpoints kept while training; if the newest cannot be read, the one before serves.",
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

    @field_validator("features", mode="before")
    @classmethod
    def _one(cls, given: object) -> object:
        return [given] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one_source(self) -> TrainConfig:
        if self.features:
            for name in _ON_THE_FLY:
                if getattr(self, name) != TrainConfig.model_fields[name].default:
                    raise ValueError(
                        f"{_flag(name)} is for features on the fly, and --features are as they were made: "
                        "leave one of the two out"
                    )
        elif self.conversations is None or self.target is None:
            raise ValueError("give --features, or --conversations and the --target that answered them")
        elif self.needs_every_last and self.last != "all":
            raise ValueError(f"--head {self.head} learns from the last state of every token: give --last all")
        return self

    @model_validator(mode="after")
    def _flags_go_together(self) -> TrainConfig:
        if self.patience is not None and self.holdout == 0:
            raise ValueError("--patience needs held-out conversations: give a --holdout above 0")
        if self.init_from is not None and self.init not in ("auto", "random"):
            raise ValueError(f"--init {self.init} and --init-from both say what to start from: leave one out")
        if self.head == "medusa" and (self.eval_steps or 0) > self.ttt_steps:
            raise ValueError(
                f"--eval-steps {self.eval_steps} is more than Medusa's {self.ttt_steps} heads (--ttt-steps)"
            )
        return self

    @property
    def number_format(self) -> str:
        """`bfloat16` or `float32`."""
        return "bfloat16" if self.dtype == "auto" else self.dtype

    @property
    def needs_every_last(self) -> bool:
        """Whether the head learns from the target's last state at every token, as all but EAGLE-3 do."""
        return self.head != "eagle3"

    @property
    def chosen_optimizer(self) -> OptimizerKind:
        """Of `optimizer`, with auto resolved."""
        return "muon" if self.optimizer == "auto" else self.optimizer

    @property
    def measured_steps(self) -> int:
        """Draft steps measured on held-out rows."""
        return self.eval_steps or self.ttt_steps

    def result_settings(self) -> dict[str, Any]:
        """What decides the head, beside where its rows come from."""
        settings = self.model_dump(mode="json", exclude={*RUNNING, *_ON_THE_FLY})
        return settings | {"dtype": self.number_format, "optimizer": self.chosen_optimizer}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
