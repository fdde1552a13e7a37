"""What the stage prints: a table, and in plain words whether the texts are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from stages.bench.lossless import FLOAT32, Lossless
from stages.bench.metrics import Metrics

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

POOLED = "all"


class BenchResult(BaseModel):
    """The report's numbers, and where the rest of it is (`seconds` 0: it was there already)."""

    output: str
    report: str
    dtype: str
    sets: dict[str, Metrics]
    pooled: Metrics
    lossless: Lossless
    seconds: float

    def summary(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        made = f"made in {self.seconds:.0f} s" if self.seconds else "already complete"
        lines = [*sameness(self.lossless, self.dtype), f"Report: {self.report} ({made})"]
        return Group(self._table(), *(Text(line) for line in lines))

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("prompt set")
        columns = (
            "answers",
            "plain\ntok/s",
            "EAGLE-3\ntok/s",
            "speed-up\n(95 % interval)",
            "accepted\ndrafts/step",
            "tokens/step\n(plain: 1)",
        )
        for column in columns:
            table.add_column(column, justify="right")
        for name, row in self.sets.items():
            table.add_row(*_cells(name, row))
        if len(self.sets) > 1:
            table.add_section()
            table.add_row(*_cells(POOLED, self.pooled))
        return table


def sameness(lossless: Lossless, dtype: str) -> list[str]:
    """Whether the answers are plain decoding's, in sentences."""
    same = f"{_of(lossless.identical, lossless.requests)} answers are the same, token for token"
    lines = [f"Same text: {same}{', in float32' if dtype == FLOAT32 else ''}."]
    if lossless.near_ties:
        gaps = [item.gap for item in lossless.divergences if not item.fault and item.gap is not None]
        part = f"{lossless.near_ties} {'parts' if lossless.near_ties == 1 else 'part'}"
        lines.append(
            f"{part} from plain decoding at a near-tie, where {dtype} rounds either way: in float32 both "
            f"tokens there are within {max(gaps):.3f} logits of the best (bound {lossless.near_tie_gap:g})."
        )
    if lossless.faults:
        lines.append(f"{lossless.faults} differ for no such reason: these are faults.")
    check = lossless.float32
    if check.prompts and dtype != FLOAT32:
        lines.append(
            f"Checked exactly in float32: {_of(check.identical, check.prompts)} prompts have identical "
            "answers."
        )
    return lines


def _cells(name: str, row: Metrics) -> tuple[str, ...]:
    interval = ""
    if row.speedup_ci95 is not None:
        low, high = row.speedup_ci95
        interval = f" ({low:.2f}-{high:.2f})"
    return (
        name,
        f"{row.requests:,}",
        f"{row.plain.tokens_per_s:,.1f}",
        f"{row.eagle.tokens_per_s:,.1f}",
        f"{row.speedup:.2f}x{interval}",
        f"{row.accepted_per_step:.2f}",
        f"{row.tokens_per_step:.2f}",
    )


def _of(part: int, whole: int) -> str:
    return f"all {whole}" if part == whole > 1 else f"{part} of {whole}"
