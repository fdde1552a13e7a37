"""The charts of a report, in the order of the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stages.bench.contestant import PLAIN
from stages.bench.levels import Sweep
from stages.bench.load import Load
from stages.bench.page.charts import (
    LONGEST_LABEL,
    PLAIN_STYLE,
    STYLES,
    Bar,
    Style,
    bar_chart,
    line_chart,
    stacked_chart,
)
from stages.bench.report import BenchReport
from stages.bench.result import POOLED, title

DEPTHS = 8
"""Levels of a tree that are drawn; few steps get further."""
_WANTED = (
    ("Median TPOT", "Time per output token after the first, lower is better", "ms per token",
     "median_tpot_ms", 1),
    ("Output throughput", "All requests together, higher is better", "tokens per second",
     "output_throughput", 1),
    ("Median TTFT", "Time to the first token, lower is better", "ms", "median_ttft_ms", 0),
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A chart with what is written above it; `heading` parts those of several temperatures."""

    caption: str
    note: str
    svg: str
    heading: str = ""

    @property
    def name(self) -> str:
        """For a file: `median-tpot`, or `median-tpot-temperature-1`."""
        return re.sub(r"[^a-z0-9.]+", "-", f"{self.caption} {self.heading}".lower()).strip("-")


def figures(report: BenchReport) -> list[Figure]:
    """All charts; those of several temperatures are drawn apart."""
    styles, views = _styles(report), report.views()
    found = []
    for temperature, view in views.items():
        heading = f"Temperature {temperature:g}" if len(views) > 1 else ""
        for each in (*_sweep_charts(view.sweep, styles), *_shared_charts(view, styles)):
            found.append(Figure(each.caption, each.note, each.svg, heading))
    return found


def _styles(report: BenchReport) -> dict[str, Style]:
    """By title, the same in every chart."""
    names = [] if report.sweep is None else report.sweep.contestants
    if report.sets:
        names = list(dict.fromkeys([PLAIN, *names, report.drafter]))
    others = [name for name in names if name != PLAIN]
    styles = {title(name): STYLES[i % len(STYLES)] for i, name in enumerate(others)}
    return {title(PLAIN): PLAIN_STYLE, **styles}


def _sweep_charts(sweep: Sweep | None, styles: dict[str, Style]) -> list[Figure]:
    """Over concurrency, and over the rate of requests."""
    if sweep is None:
        return []
    together = [load for load in sweep.loads if load.rate is None]
    rates = [load for load in sweep.loads if load.rate is not None]
    charts = []
    if together:
        xs = [str(load.concurrency) for load in together]
        charts += _over(sweep, together, "requests at once", xs, styles, "")
    if rates:
        xs = [f"{load.rate:g}" for load in rates]
        charts += _over(sweep, rates, "requests a second", xs, styles, " by rate" if together else "")
    return charts


def _over(
    sweep: Sweep, loads: Sequence[Load], x_label: str, xs: Sequence[str], styles: dict[str, Style], more: str
) -> list[Figure]:
    charts = []
    for caption, note, unit, name, digits in _WANTED:
        lines = {
            title(each): [getattr(at, name) for at in sweep.of(each) if at.load in loads]
            for each in sweep.contestants
        }
        svg = line_chart(caption, x_label, unit, xs, lines, styles, digits=digits)
        charts.append(Figure(caption + more, note, svg))
    return charts


def _shared_charts(report: BenchReport, styles: dict[str, Style]) -> list[Figure]:
    charts = []
    if bars := _speedup_bars(report, styles):
        base = title(PLAIN if report.sweep is None else report.sweep.baseline)
        charts.append(
            Figure(
                "Speed-up by task",
                f"One request at a time, over {base} (dashed line); whiskers are 95 % intervals",
                bar_chart("Speed-up by task", "times as fast", bars, reference=1.0),
            )
        )
    if lines := _acceptance(report):
        depths = [str(i + 1) for i in range(max(map(len, lines.values())))]
        filled: dict[str, Sequence[float | None]] = {
            name: [*line, *[0.0] * (len(depths) - len(line))] for name, line in lines.items()
        }
        charts.append(
            Figure(
                "Acceptance by position",
                "Share of the target's passes that accepted a draft at this position; one request at a time",
                line_chart(
                    "Acceptance by position", "position in the draft", "% of passes", depths, filled, styles
                ),
            )
        )
    if rows := _breakdown(report):
        parts = ("prompt", "draft", "verify", "other")
        charts.append(
            Figure(
                "Where the time goes",
                "Per output token; verify is the target's own passes",
                stacked_chart("Where the time goes", "ms per output token", parts, rows),
            )
        )
    return charts


def _speedup_bars(report: BenchReport, styles: dict[str, Style]) -> list[Bar]:
    """Of the pairs, and of the other contestants as far as the sweep has them at one request at a time."""
    main = title(report.drafter)
    rows = dict(report.sets)
    if len(rows) > 1 and report.pooled is not None:
        rows[POOLED] = report.pooled
    levels = [] if report.sweep is None else report.sweep.levels
    others = [
        level
        for level in levels
        if level.concurrency == 1
        and level.request_rate is None
        and level.contestant not in (PLAIN, report.sweep and report.sweep.baseline)
        and (report.pooled is None or level.contestant != report.drafter)
    ]
    if not others and max(map(len, rows), default=0) <= LONGEST_LABEL:
        return [Bar(name, row.speedup, row.speedup_ci95, styles[main]) for name, row in rows.items()]
    sets = list(rows) or [*others[0].speedup_by_set, POOLED]
    bars = []
    for name in sets:
        if name in rows:
            bars.append(Bar(main, rows[name].speedup, rows[name].speedup_ci95, styles[main], name))
        for level in others:
            value, interval = level.speedup_by_set.get(name), level.speedup_by_set_ci95.get(name)
            if name == POOLED:
                value, interval = level.speedup, level.speedup_ci95
            if value is not None:
                who = title(level.contestant)
                bars.append(Bar(who, value, interval, styles[who], name))
    return bars


def _acceptance(report: BenchReport) -> dict[str, list[float]]:
    """Percent by position, of whoever drafts."""
    lines: dict[str, list[float]] = {}
    if report.pooled is not None:
        lines[title(report.drafter)] = report.pooled.accepted_per_depth
    for level in () if report.sweep is None else report.sweep.at(report.sweep.loads[0]):
        if level.accepted_per_depth:
            lines.setdefault(title(level.contestant), level.accepted_per_depth)
    return {name: [100 * share for share in line[:DEPTHS]] for name, line in lines.items() if any(line)}


def _breakdown(report: BenchReport) -> list[tuple[str, list[float]]]:
    """Milliseconds per output token: prompt, draft, verify, other."""
    rows: list[tuple[str, list[float]]] = []
    levels = [] if report.sweep is None else report.sweep.levels
    timed = [level for level in levels if level.verify_s is not None and level.request_rate is None]
    if timed:
        for level in timed:
            parts = (level.prefill_s, level.draft_s, level.verify_s, level.other_s)
            label = f"{level.concurrency} at once, {title(level.contestant)}"
            tokens = level.total_output_tokens
            rows.append((label, [1000 * (part or 0.0) / tokens for part in parts]))
    elif report.pooled is not None:
        plain, eagle = report.pooled.plain, report.pooled.eagle
        prefill = sum(each.plain.ttft_s for each in report.requests)
        rows.append(
            (title(PLAIN), [1000 * s / plain.tokens for s in (prefill, 0.0, plain.seconds - prefill, 0.0)])
        )
        shares = (eagle.prefill_share, eagle.draft_share, eagle.verify_share)
        per_token = 1000 * eagle.seconds / eagle.tokens
        other = max(0.0, 1 - sum(shares))
        rows.append((title(report.drafter), [per_token * share for share in (*shares, other)]))
    return rows
