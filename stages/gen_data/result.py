"""What `eagle gen-data` made, or would make."""

from __future__ import annotations

from pydantic import BaseModel

from stages.artifacts import Manifest
from stages.config import several
from stages.gen_data.tally import describe_left_out
from stages.progress import duration


class GenDataResult(BaseModel):
    """What the stage made, or found complete (`seconds` 0).

    Attributes:
        response_tokens: tokens that the target sampled, of `tokens` in all.
        cut_rows: rows whose last answer was cut at the longest answer allowed.
        sources: by source, the rows `read`, those `kept`, and those left out by reason.
        ended: dialogues that ended before their last turn, by reason; also those with rows.
        pii: findings in prompts, by kind; also those of prompts left out.
        pii_by_source: the same by source and kind.
        pii_rows: prompts with findings that were kept, replaced or flagged, by source.
        pii_in_answers: findings in answers, by source and kind.
    """

    output: str
    rows: int
    tokens: int
    response_tokens: int
    cut_rows: int
    sources: dict[str, dict[str, int]]
    ended: dict[str, int]
    pii: dict[str, int]
    pii_by_source: dict[str, dict[str, int]] = {}
    pii_rows: dict[str, int] = {}
    pii_in_answers: dict[str, dict[str, int]] = {}
    shards: int
    bytes: int
    seconds: float

    @classmethod
    def of(cls, output: str, manifest: Manifest, seconds: float) -> GenDataResult:
        """Of an artifact at `output`, made in that many seconds, or found."""
        made = {
            "output": output,
            "shards": len(manifest.shards),
            "bytes": sum(shard.bytes for shard in manifest.shards),
            "seconds": seconds,
        }
        return cls.model_validate(manifest.counts | made)

    def summary(self) -> str:
        made = f"in {self.seconds:.1f} s" if self.seconds else "already complete"
        notes = [*_notes(self.sources, self.pii), f"{several(self.shards, 'shard')}, {made}"]
        return "; ".join(
            [
                f"{self.output}: {several(self.rows, 'conversation')}, "
                f"{several(self.response_tokens, 'response token')} of {self.tokens:,}, "
                f"{several(self.cut_rows, 'answer')} cut",
                *notes,
            ]
        )


class GenDataPlan(BaseModel):
    """What a run would do.

    Attributes:
        prompts, turns: to be answered.
        tokens_per_s: sampled tokens a second, of a short trial.
        most_seconds: how long it takes at that rate if every answer has full length.
    """

    output: str
    sources: dict[str, dict[str, int]]
    pii: dict[str, int]
    prompts: int
    turns: int
    tokens_per_s: float
    most_seconds: float

    def summary(self) -> str:
        notes = "; ".join(_notes(self.sources, self.pii)) or "nothing left out"
        return (
            f"{self.output} would have {several(self.prompts, 'conversation')} with "
            f"{several(self.turns, 'answer')}; {notes}; "
            f"at {self.tokens_per_s:,.0f} tokens a second it takes {duration(self.most_seconds)} at most; "
            "nothing was written"
        )


def _notes(sources: dict[str, dict[str, int]], pii: dict[str, int]) -> list[str]:
    left_out = describe_left_out(sources)
    return [
        *([f"left out: {left_out}"] if left_out else []),
        *([f"personal data: {', '.join(f'{n:,} {kind}' for kind, n in pii.items())}"] if pii else []),
    ]
