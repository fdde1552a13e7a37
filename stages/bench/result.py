"""What the stage prints: a table, and in plain words whether the texts are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from stages.bench.contestant import WITH_TREE
from stages.bench.levels import Level, Sweep
from stages.bench.lossless import FLOAT32, Lossless
from stages.bench.metrics import Metrics

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

POOLED = "all"
_TITLES = {
    "none": "plain",
    "eagle3": "EAGLE-3",
    "eagle1": "EAGLE-1",
    "medusa": "Medusa",
    "ngram": "n-gram",
    "transformers:prompt-lookup": "transformers lookup",
}


def title(name: str) -> str:
    """How a contestant is called in tables and charts: EAGLE-3 for eagle3; others as they are."""
    drafter, comma, tree = name.partition(WITH_TREE)
    stem, dash, number = drafter.rpartition("-")
    if dash and number.isdecimal() and stem in _TITLES:
        drafter = f"{_TITLES[stem]} ({number})"
    return _TITLES.get(drafter, drafter) + comma + tree


def rows_of(
    sets: Mapping[str, Metrics], by_temperature: Mapping[str, Metrics], pooled: Metrics | None
) -> dict[str, Metrics]:
    """What a table shows: the sets, and where there are several of them, all as one, by temperature."""
    rows = dict(sets)
    if by_temperature:
        if len(sets) > len(by_temperature):
            rows |= {f"{POOLED} T={temperature}": row for temperature, row in by_temperature.items()}
    elif len(sets) > 1 and pooled is not None:
        rows[POOLED] = pooled
    return rows


def at_temperature(level: Level, sweep: Sweep) -> str:
    """` T=1`, where levels differ in it."""
    several = len({each.temperature for each in sweep.levels}) > 1
    return f" T={level.temperature:g}" if several else ""


class BenchResult(BaseModel):
    """The report's numbers, and where the rest of it is (`seconds` 0: it was there already).

    page: report.html; None for a report of a version that had none.
    """

    output: str
    report: str
    page: str | None = None
    dtype: str
    drafter: str = "eagle3"
    sets: dict[str, Metrics]
    pooled: Metrics | None
    by_temperature: dict[str, Metrics] = Field(default_factory=dict)
    lossless: Lossless | None
    sweep: Sweep | None = None
    seconds: float

    def summary(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        made = f"made in {self.seconds:.0f} s" if self.seconds else "already complete"
        lines = [] if self.pooled is None else left_out(self.pooled)
        lines += sameness(self.lossless, self.dtype) if self.lossless is not None else []
        lines.append(f"Report: {self.report} ({made})")
        if self.page is not None:
            lines.append(f"Charts: {self.page}")
        tables = [self._table()] if self.pooled is not None else []
        if self.sweep is not None:
            tables.append(sweep_table(self.sweep))
        return Group(*tables, *(Text(line) for line in lines))

    def _table(self) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("prompt set")
        columns = (
            "answers",
            "plain\ntok/s",
            f"{title(self.drafter)}\ntok/s",
            "speed-up\n(95 % interval)",
            "accepted\ndrafts/step",
            "tokens/step\n(plain: 1)",
        )
        for column in columns:
            table.add_column(column, justify="right")
        rows = rows_of(self.sets, self.by_temperature, self.pooled)
        for place, (name, row) in enumerate(rows.items()):
            if place == len(self.sets):
                table.add_section()
            table.add_row(*_cells(name, row))
        return table


def sweep_table(sweep: Sweep) -> Table:
    """Every contestant at every concurrency."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("load", justify="right")
    table.add_column("engine")
    columns = ("tok/s", f"vs\n{title(sweep.baseline)}", "TTFT ms\nmedian", "TPOT ms\nmedian", "TPOT ms\np99")
    for column in (*columns, "accepted\ndrafts/step", "same\ntext"):
        table.add_column(column, justify="right")
    for load in sweep.loads:
        if table.row_count:
            table.add_section()
        for place, level in enumerate(sweep.at(load)):
            shown = "" if place else load.words + at_temperature(level, sweep)
            table.add_row(shown, *_level_cells(level))
    return table


def _level_cells(level: Level) -> tuple[str, ...]:
    return (
        title(level.contestant),
        f"{level.output_throughput:,.1f}",
        speedup_cell(level.speedup, level.speedup_ci95),
        f"{level.median_ttft_ms:,.0f}",
        number(level.median_tpot_ms, 1),
        number(level.p99_tpot_ms, 1),
        number(level.accepted_per_step or None, 2),
        f"{level.identical}/{level.compared}" if level.compared else "",
    )


def speedup_cell(value: float | None, interval: tuple[float, float] | None) -> str:
    """`1.24x (1.20-1.28)`, as far as it is known."""
    if value is None:
        return ""
    return f"{value:.2f}x" + ("" if interval is None else " ({:.2f}-{:.2f})".format(*interval))


def number(value: float | None, digits: int) -> str:
    """With so many digits; empty where there is none."""
    return "" if value is None else f"{value:,.{digits}f}"


def left_out(pooled: Metrics) -> list[str]:
    """What was not answered, in a sentence; none where all was."""
    if not pooled.skipped:
        return []
    many = f"{pooled.skipped} turns are" if pooled.skipped > 1 else "1 turn is"
    return [f"{many} left out: the prompt does not fit the target's context."]


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
    return (
        name,
        f"{row.requests:,}",
        f"{row.plain.tokens_per_s:,.1f}",
        f"{row.eagle.tokens_per_s:,.1f}",
        speedup_cell(row.speedup, row.speedup_ci95),
        f"{row.accepted_per_step:.2f}",
        f"{row.tokens_per_step:.2f}",
    )


def _of(part: int, whole: int) -> str:
    return f"all {whole}" if part == whole > 1 else f"{part} of {whole}"
