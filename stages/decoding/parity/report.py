"""What the gate found."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from stages.errors import EagleError

BOUND = 0.05
"""Largest difference of predicted and measured tokens a step, as a share of the predicted."""


class Tried(BaseModel):
    """A suspect, and what is left of the difference with it put otherwise."""

    model_config = ConfigDict(frozen=True)

    cause: str
    change: str
    left: float = Field(
        description="What is left of the difference: of the logits if these differ, else of the states if "
        "these do, else of the tokens a step."
    )


class ParityReport(BaseModel):
    """Predicted against measured, and why they differ if they do."""

    model_config = ConfigDict(frozen=True)

    dtype: str = Field(description="Number format that target and head decoded in.")
    steps: int = Field(description="Drafts of a chain.")
    rows: int = Field(description="Held-out conversations that were replayed.")
    cycles: int = Field(description="Verify steps that were measured.")
    predicted_tokens_per_step: float
    measured_tokens_per_step: float
    gap: float = Field(description="1 - measured / predicted.")
    gap_ci95: tuple[float, float] | None = Field(
        description="95 % bootstrap interval of gap over conversations; null for fewer than four."
    )
    bound: float = BOUND
    logits_compared: int = Field(description="Logits of the drafter compared with training's, in float32.")
    logits_difference: float | None = Field(
        description="The largest difference, as a share of the largest logit at the same place but of 1 at "
        "least; null if none was compared."
    )
    logits_bound: float
    states_difference: float | None = Field(
        description="How far the target's states are from those that training was fed, as a share of their "
        "length: the median over tokens, at the worst feature layer. Null where those are not at hand."
    )
    states_bound: float
    cause: str | None = Field(description="What explains a failure, if anything that was tried does.")
    change: str | None = Field(description="What was put otherwise so that the difference was gone.")
    tried: list[Tried]
    warnings: list[str]

    @property
    def logits_differ(self) -> bool:
        return self.logits_difference is not None and not self.logits_difference <= self.logits_bound

    @property
    def states_differ(self) -> bool:
        return self.states_difference is not None and not self.states_difference <= self.states_bound

    @property
    def tokens_differ(self) -> bool:
        """Beyond the bound, and beyond what these rows could show by chance."""
        if self.gap_ci95 is None:
            return False
        low, high = self.gap_ci95
        return low > self.bound or high < -self.bound

    @property
    def failed(self) -> bool:
        return self.logits_differ or self.states_differ or self.tokens_differ

    def record(self) -> dict[str, Any]:
        """For a manifest's counts."""
        return self.model_dump(mode="json") | {"failed": self.failed}

    def lines(self) -> list[str]:
        """What was compared, a line each, and what was tried."""
        interval = ""
        if self.gap_ci95 is not None:
            low, high = self.gap_ci95
            interval = f", 95 % interval {low:+.1%} to {high:+.1%}"
        lines = [
            f"Tokens a step: {self.predicted_tokens_per_step:.2f} predicted, "
            f"{self.measured_tokens_per_step:.2f} measured (gap {self.gap:+.1%}{interval}) on {self.rows} "
            f"held-out conversations, chains of {self.steps} in {self.dtype}"
        ]
        if self.logits_difference is not None:
            lines.append(
                f"Logits: within {self.logits_difference:.1g} of training's, of {self.logits_compared:,} in "
                "float32"
            )
        if self.states_difference is not None:
            lines.append(f"Target's states: within {self.states_difference:.1%} of those in training")
        if self.tried:
            left = ", ".join(f"{each.change}: {each.left:.2g}" for each in self.tried)
            lines.append(f"What is left of the difference with {left}")
        return [*lines, *self.warnings]

    def require(self, head: str, result: Any = None) -> None:
        """Raises EagleError, with `result`: the head named so does not draft as it was trained to."""
        if not self.failed:
            return
        if self.tokens_differ:
            what = (
                f"training predicts {self.predicted_tokens_per_step:.2f} tokens a step and decoding measures "
                f"{self.measured_tokens_per_step:.2f}"
            )
        elif self.logits_differ:
            what = f"the logits of decoding differ from training's by {self.logits_difference:.2g}"
        else:
            what = f"the states it is fed differ from those of its training by {self.states_difference:.0%}"
        if self.cause is None:
            why = "none of " + ", ".join(dict.fromkeys(each.cause for each in self.tried)) + " explains it"
        elif self.change is None:
            why = f"the likely cause: {self.cause}"
        else:
            why = f"the likely cause: {self.cause}, for with {self.change} the difference is gone"
        raise EagleError(f"{head} does not draft as it was trained to: {what}; {why}", result=result)
