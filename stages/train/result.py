"""What the train stage tells of a head."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from stages.artifacts import Manifest
from stages.config import several
from stages.train.acceptance import format_rates

NOTABLE_WAITING = 0.01


class ParityFigures(BaseModel):
    """What decoding made of held-out rows with a greedy chain, and what training says of them."""

    rows: int
    predicted_tokens_per_step: float
    measured_tokens_per_step: float


class TrainResult(BaseModel):
    """What the stage made, or found complete (`seconds` 0). Lists have an entry for each draft step."""

    output: str
    head: str
    steps: int
    planned_steps: int
    best_step: int  # whose weights the head has
    ended_early: str  # why, if it did
    processes: int
    train_rows: int
    train_tokens: int
    holdout_rows: int
    holdout_agreement: list[float]
    holdout_accepted_per_step: float
    holdout_tokens_per_step: float  # with a greedy chain
    holdout_sampled_tokens_per_step: float  # with a chain at temperature 1
    holdout_tree_tokens_per_step: float  # with a greedy tree
    parity: ParityFigures | None  # of those held-out rows that were decoded, if any were
    draft_vocab_size: int
    draft_vocab_coverage: float
    parameters: int
    target_parameters: int
    waiting: float = 0.0  # share of the training time in which rows were not ready
    seconds: float

    @classmethod
    def of(cls, output: str, manifest: Manifest, seconds: float) -> TrainResult:
        """Of the manifest of a finished head."""
        counts: dict[str, Any] = dict(manifest.counts)
        holdout = counts.pop("holdout")
        assert isinstance(holdout, dict)
        made = {
            "output": output,
            "holdout_agreement": holdout.get("agreement", []),
            "holdout_accepted_per_step": holdout.get("accepted_per_step", 0.0),
            "holdout_tokens_per_step": holdout.get("tokens_per_step", 0.0),
            "holdout_sampled_tokens_per_step": holdout.get("sampled", {}).get("tokens_per_step", 0.0),
            "holdout_tree_tokens_per_step": holdout.get("tree", {}).get("tokens_per_step", 0.0),
            "parity": counts.get("parity") or None,
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
            f"({share:.1%} of the target's), {several(self.draft_vocab_size, 'draft token')}, "
            f"{several(self.steps, 'step')} on {self.train_tokens:,} tokens, {made}"
        )
        if self.holdout_rows:
            text += (
                f"; held out: agreement {format_rates(self.holdout_agreement)}, "
                f"{self.holdout_tokens_per_step:.2f} tokens a step with a greedy chain of "
                f"{len(self.holdout_agreement)} ({self.holdout_sampled_tokens_per_step:.2f} at "
                f"temperature 1, {self.holdout_tree_tokens_per_step:.2f} with a tree)"
            )
        if self.parity is not None:
            text += (
                f"; decoding {self.parity.rows} of them: {self.parity.measured_tokens_per_step:.2f} tokens a "
                f"step, {self.parity.predicted_tokens_per_step:.2f} predicted"
            )
        return text
