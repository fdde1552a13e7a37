"""What changed from one report to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from stages.artifacts import open_artifact
from stages.bench.report import REPORT_NAME, BenchReport
from stages.bench.result import at_temperature, rows_of, title
from stages.errors import EagleError

if TYPE_CHECKING:
    from rich.console import RenderableType

_PLACES = {"output", "prompts", "target", "head", "endpoint", "launch"}


class Change(BaseModel):
    """One number of both reports."""

    where: str
    what: str
    before: float
    after: float

    @property
    def percent(self) -> float | None:
        return 100 * (self.after / self.before - 1) if self.before else None


class Comparison(BaseModel):
    """The numbers that both reports have, and what else differs between them.

    settings: by name, before and after; of the machine and the versions too.
    within: sets whose two speed-ups have overlapping intervals.
    """

    before: str
    after: str
    changes: list[Change]
    settings: dict[str, tuple[Any, Any]]
    within: list[str]
    faults: tuple[int, int]

    def summary(self) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("", "what"):
            table.add_column(column)
        for column in ("before", "after", "change"):
            table.add_column(column, justify="right")
        last = None
        for each in self.changes:
            if last is not None and each.where != last:
                table.add_section()
            percent = "" if each.percent is None else f"{each.percent:+.1f} %"
            shown = each.where if each.where != last else ""
            table.add_row(shown, each.what, f"{each.before:,.2f}", f"{each.after:,.2f}", percent)
            last = each.where
        lines = [f"Before: {self.before}", f"After: {self.after}"]
        if self.within:
            lines.append(
                f"Speed-up of {', '.join(self.within)}: the 95 % intervals overlap, the change may be chance."
            )
        lines += [f"Differs: {key}: {a} -> {b}" for key, (a, b) in self.settings.items()]
        if any(self.faults):
            lines.append(
                f"Answers that are not the target's own: {self.faults[0]} before, {self.faults[1]} after."
            )
        return Group(table, *(Text(line) for line in lines))


def run(uris: tuple[str, str], fail_below: float | None) -> Comparison:
    """Raises EagleError: one is no report of speed, or, after the comparison, the second is too slow."""
    before, after = (read_report(uri) for uri in uris)
    comparison = compare(before, after, *uris)
    if fail_below is not None:
        if after.pooled is None:
            raise EagleError(f"--fail-below: {uris[1]} measured endpoints only, which have no speed-up")
        require_speed(after, fail_below, uris[1], comparison)
    return comparison


def require_speed(report: BenchReport, least: float, uri: str, result: Any) -> None:
    """Raises EagleError: the speed-up, at any temperature, is below what was asked for."""
    for temperature, speedup in report.speedups.items():
        if speedup < least:
            at = f" at temperature {temperature}" if temperature else ""
            raise EagleError(
                f"the speed-up of {uri}{at} is {speedup:.3f}, below --fail-below {least:g}", result=result
            )


def compare(before: BenchReport, after: BenchReport, before_uri: str, after_uri: str) -> Comparison:
    old, new = _numbers(before), _numbers(after)
    within = [
        name
        for name in before.sets
        if name in after.sets and _overlap(before.sets[name].speedup_ci95, after.sets[name].speedup_ci95)
    ]
    return Comparison(
        before=before_uri,
        after=after_uri,
        changes=[
            Change(where=where, what=what, before=value, after=new[where, what])
            for (where, what), value in old.items()
            if (where, what) in new
        ],
        settings=_differing(_settings(before), _settings(after)),
        within=within,
        faults=(_faults(before), _faults(after)),
    )


def read_report(uri: str) -> BenchReport:
    """Raises EagleError: it is no report of speed, or one of another version that cannot be read."""
    data = open_artifact(uri, "report").read(REPORT_NAME)
    if b'"schema_version"' not in data:
        raise EagleError(f"{uri} has no measured speed: give reports that eagle bench made without --parity")
    try:
        return BenchReport.model_validate_json(data)
    except ValidationError:
        raise EagleError(f"{uri} was written by another version of eagle: measure it again") from None


def _numbers(report: BenchReport) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for name, row in rows_of(report.sets, report.by_temperature, report.pooled).items():
        for what, value in (
            ("speed-up", row.speedup),
            ("plain tok/s", row.plain.tokens_per_s),
            ("drafted tok/s", row.eagle.tokens_per_s),
            ("accepted drafts/step", row.accepted_per_step),
        ):
            found[name, what] = value
    sweep = report.sweep
    for level in sweep.levels if sweep is not None else ():
        at = "" if sweep is None else at_temperature(level, sweep)
        where = f"{title(level.contestant)}, {level.load.words}{at}"
        for what, number in (
            ("tok/s", level.output_throughput),
            ("speed-up", level.speedup),
            ("TTFT ms, median", level.median_ttft_ms),
            ("TPOT ms, median", level.median_tpot_ms),
            ("accepted drafts/step", level.accepted_per_step),
        ):
            if number is not None:
                found[where, what] = number
    return found


def _settings(report: BenchReport) -> dict[str, Any]:
    kept = {key: value for key, value in report.settings.items() if key not in _PLACES}
    return {"eagle": report.eagle_version, **kept, **report.hardware.model_dump()}


def _differing(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (old[key], new[key]) for key in old if key in new and old[key] != new[key]}


def _overlap(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool:
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def _faults(report: BenchReport) -> int:
    return 0 if report.lossless is None else report.lossless.faults
