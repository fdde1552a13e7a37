"""What `eagle train` can be told."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stages.config import CommonConfig


class TrainConfig(CommonConfig):
    """Settings of the train stage; the defaults suit a small target and some 100,000 response tokens."""

    features: str = Field(description="URI of the features artifact to learn from.")
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
    seed: int = Field(
        default=0, ge=0, description="Seed of the initial weights, the order and the held-out choice."
    )
