"""What an extraction would take, before it is started: rows, tokens, room, and time after a few batches."""

from __future__ import annotations

import time
from typing import Any

from pydantic import BaseModel
from rich.table import Table

from stages.features.engine import StatesEngine
from stages.features.extraction import Extraction, Extractor
from stages.progress import Reporter, duration

SAMPLED_BATCHES = 8
SAMPLE_SECONDS = 20.0


class FeaturesEstimate(BaseModel):
    """The stage's result with --estimate. Bytes are exact for the data; the manifest comes on top.

    Attributes:
        free_bytes: room at the output, None where that is not known.
        tokens_per_s: measured on a few batches.
        seconds: of the whole run, loading the target not included.
    """

    conversations: str
    output: str | None
    rows: int
    tokens: int
    supervised_tokens: int
    clipped_rows: int
    dropped_rows: int
    skipped_rows: int
    left_out_rows: int
    feature_layers: tuple[int, int, int]
    storage_dtype: str
    shards: int
    features_bytes: int
    target_bytes: int
    bytes: int
    bytes_per_token: float
    free_bytes: int | None
    tokens_per_s: float
    seconds: float

    def summary(self) -> Table:
        table = Table(title=f"Features of {self.conversations}", title_justify="left", show_header=False)
        table.add_column(justify="left")
        table.add_column(justify="right")
        others = {
            "clipped": self.clipped_rows,
            "too long": self.dropped_rows,
            "without a label": self.skipped_rows,
            "beyond --max-tokens": self.left_out_rows,
        }
        table.add_row("rows", f"{self.rows:,}")
        for name, count in others.items():
            if count:
                table.add_row(f"  {name}", f"{count:,}")
        table.add_row("tokens", f"{self.tokens:,}")
        table.add_row("  supervised", f"{self.supervised_tokens:,}")
        table.add_row("bytes", gigabytes(self.bytes))
        table.add_row(f"  states in {self.storage_dtype}", gigabytes(self.features_bytes))
        table.add_row("  target/", gigabytes(self.target_bytes))
        table.add_row("  a token", f"{self.bytes_per_token:,.0f} B")
        if self.free_bytes is not None:
            enough = "enough" if self.free_bytes > self.bytes else "not enough"
            table.add_row(f"free at {self.output}", f"{gigabytes(self.free_bytes)}, {enough}")
        table.add_row("shards", f"{self.shards:,}")
        table.add_row("tokens/s", f"{self.tokens_per_s:,.0f}")
        table.add_row("time", duration(self.seconds))
        return table


def estimate(
    extraction: Extraction,
    *,
    engine: StatesEngine,
    output: str | None,
    free: int | None,
    target_bytes: int,
    report: Reporter,
) -> FeaturesEstimate:
    """Counts what is planned and times a sample of it on the target."""
    with extraction.running(engine) as extractor:
        rate = sampled_rate(extraction, extractor, report)
    padded = sum(map(extraction.plan.padded_tokens_of, range(len(extraction.plan.batches))))
    tokens, seconds = extraction.plan.tokens, padded / rate
    counts: dict[str, Any] = extraction.plan.counts()
    return FeaturesEstimate(
        conversations=extraction.conversations.artifact.uri,
        output=output,
        **counts,
        feature_layers=extraction.layers,
        storage_dtype=extraction.storage.name,
        shards=len(extraction.shards),
        features_bytes=extraction.bytes,
        target_bytes=target_bytes,
        bytes=extraction.bytes + target_bytes,
        bytes_per_token=extraction.bytes / max(tokens, 1),
        free_bytes=free,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        seconds=seconds,
    )


def sampled_rate(extraction: Extraction, extractor: Extractor, report: Reporter) -> float:
    """Tokens a second, padding included, over batches from all of the plan; the first one only warms up."""
    batches = len(extraction.plan.batches)
    chosen = sorted({batches * i // SAMPLED_BATCHES for i in range(min(batches, SAMPLED_BATCHES))})
    tokens, seconds = 0, 0.0
    with report.task("timing", total=len(chosen), unit="batches") as task:
        for warming, number in [*((True, number) for number in chosen[:1]), *((False, n) for n in chosen)]:
            start = time.perf_counter()
            extractor.batch(number)
            if warming:
                continue
            seconds += time.perf_counter() - start
            tokens += extraction.plan.padded_tokens_of(number)
            task.advance()
            if seconds > SAMPLE_SECONDS:
                break
    return tokens / seconds if tokens else 1.0


def gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
