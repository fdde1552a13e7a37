"""What the train stage tells of a head."""

from __future__ import annotations

from pydantic import BaseModel

from stages.artifacts import Manifest
from stages.train.metrics import format_rates

NOTABLE_WAITING = 0.01


class TrainResult(BaseModel):
    """What the stage made, or found complete (`seconds` 0). Lists have an entry for each draft step."""

    output: str
    head: str
    steps: int
    train_rows: int
    train_tokens: int
    holdout_rows: int
    holdout_agreement: list[float]
    holdout_accepted_per_step: float
    holdout_tokens_per_step: float
    draft_vocab_size: int
    draft_vocab_coverage: float
    parameters: int
    target_parameters: int
    waiting: float = 0.0  # share of the training time in which rows were not ready
    seconds: float

    @classmethod
    def of(cls, output: str, manifest: Manifest, seconds: float) -> TrainResult:
        """Of the manifest of a finished head."""
        counts = dict(manifest.counts)
        holdout = counts.pop("holdout")
        assert isinstance(holdout, dict)
        made = {
            "output": output,
            "holdout_agreement": holdout.get("agreement", []),
            "holdout_accepted_per_step": holdout.get("accepted_per_step", 0.0),
            "holdout_tokens_per_step": holdout.get("tokens_per_step", 0.0),
            "seconds": seconds,
        }
        return cls.model_validate(counts | made)

    def summary(self) -> str:
        share = self.parameters / self.target_parameters
        made = f"in {self.seconds:.0f} s" if self.seconds else "already complete"
        if self.seconds and self.waiting >= NOTABLE_WAITING:
            made += f" ({self.waiting:.0%} of it waiting for features)"
        text = (
            f"{self.output}: {self.head} head of {self.parameters / 1e6:.1f} M parameters "
            f"({share:.1%} of the target's), {self.draft_vocab_size:,} draft tokens, "
            f"{self.steps:,} steps on {self.train_tokens:,} tokens, {made}"
        )
        if self.holdout_rows:
            text += (
                f"; held out: agreement {format_rates(self.holdout_agreement)}, "
                f"{self.holdout_tokens_per_step:.2f} tokens a step with a greedy chain of "
                f"{len(self.holdout_agreement)}"
            )
        return text
