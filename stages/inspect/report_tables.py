"""A report's numbers as tables. The report is read as JSON, so an older one is shown as far as it goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stages.inspect.result import Rows
from stages.inspect.text import printable

POOLED = "all"


def report_tables(shown: Rows) -> Iterator[RenderableType]:
    if "parity" in shown.totals:  # its numbers are all among the counts
        return
    yield _sets(shown.totals)
    yield Text(_lossless(shown.totals.get("lossless")))
    yield Text()
    yield Text(printable(shown.note), style="dim")
    yield _requests([row for row in shown.rows if isinstance(row, Mapping)])


def _sets(report: Mapping[str, Any]) -> Table:
    table = _table("prompt set")
    for column in ("answers", "plain\ntok/s", "EAGLE\ntok/s", "speed-up", "(95 %\ninterval)"):
        table.add_column(column, justify="right")
    for column in ("accepted\na step", "tokens\na step"):
        table.add_column(column, justify="right")
    sets = report.get("sets")
    rows = list(sets.items()) if isinstance(sets, Mapping) else []
    for name, row in [*rows, (POOLED, report.get("pooled"))] if len(rows) > 1 else rows:
        interval = _at(row, "speedup_ci95")
        table.add_row(
            printable(str(name)),
            _number(row, 0, "requests"),
            _number(row, 1, "plain", "tokens_per_s"),
            _number(row, 1, "eagle", "tokens_per_s"),
            _number(row, 2, "speedup"),
            "-".join(f"{end:.2f}" for end in interval) if _is_interval(interval) else "",
            _number(row, 2, "accepted_per_step"),
            _number(row, 2, "tokens_per_step"),
            style="bold" if name == POOLED else "",
        )
    return table


def _requests(requests: list[Mapping[str, Any]]) -> Table:
    table = _table("prompt")
    for column in ("turn", "tokens\nin", "tokens\nout", "plain\ns", "EAGLE\ns", "accepted\na step"):
        table.add_column(column, justify="right")
    table.add_column("same text")
    for request in requests:
        steps = _at(request, "eagle", "steps")
        accepted = _at(request, "eagle", "accepted")
        table.add_row(
            printable(str(request.get("prompt_id"))),
            _number(request, 0, "turn"),
            _number(request, 0, "prompt_tokens"),
            _number(request, 0, "eagle", "tokens"),
            _seconds(request.get("plain")),
            _seconds(request.get("eagle")),
            f"{accepted / steps:.2f}" if _is_number(accepted) and _is_number(steps) and steps else "-",
            "yes" if request.get("identical") else "no",
        )
    return table


def _lossless(found: Any) -> str:
    counts = [_at(found, key) for key in ("identical", "requests", "near_ties", "faults")]
    if not all(isinstance(count, int) for count in counts):
        return ""
    same, requests, ties, faults = counts
    return f"Same text in {same:,} of {requests:,} answers; {ties:,} part at a near-tie; faults: {faults:,}."


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    return table


def _at(content: Any, *path: str) -> Any:
    """What is at a path of nested objects, None where it ends before."""
    for key in path:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def _number(content: Any, digits: int, *path: str) -> str:
    number = _at(content, *path)
    return f"{number:,.{digits}f}" if _is_number(number) else "-"


def _seconds(answer: Any) -> str:
    parts = [_at(answer, key) for key in ("ttft_s", "decode_s")]
    return f"{sum(parts):.2f}" if all(map(_is_number, parts)) else "-"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))
