"""A head's training log as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from stages.inspect.result import Rows
from stages.inspect.text import printable


def training_table(shown: Rows) -> Iterator[RenderableType]:
    """A line for each chosen one of the log; losses and agreements are those of draft step 1, 2, ..."""
    yield Text(printable(shown.note), style="dim")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("step", "tokens", "seconds"):
        table.add_column(column, justify="right")
    table.add_column("loss a draft step")
    table.add_column("agreement")
    for line in shown.rows:
        if isinstance(line, Mapping):
            table.add_row(*_cells(line))
    yield table


def _cells(line: Mapping[str, Any]) -> list[Text]:
    held_out = line.get("holdout")
    measured = held_out if isinstance(held_out, Mapping) else line
    loss = Text("held out", style="green") if measured is held_out else Text(_series(line.get("loss"), 3))
    return [
        Text(_count(line.get("step"))),
        Text(_count(line.get("tokens"))),
        Text(_count(line.get("seconds"))),
        loss,
        Text(_series(measured.get("agreement"), 3)),
    ]


def _count(number: Any) -> str:
    return f"{number:,.0f}" if isinstance(number, int | float) else "-"


def _series(numbers: Any, digits: int) -> str:
    if not isinstance(numbers, list) or not all(isinstance(number, int | float) for number in numbers):
        return "-"
    return " ".join(f"{number:.{digits}f}" for number in numbers)
