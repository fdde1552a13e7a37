"""Rows as people read them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from stages.artifacts import Kind
from stages.config import several
from stages.inspect.conversation_rows import ConversationRow
from stages.inspect.feature_rows import FeatureRow, Norms
from stages.inspect.report_tables import report_tables
from stages.inspect.result import Rows
from stages.inspect.sampled_text import Legend, SampledText
from stages.inspect.text import printable
from stages.inspect.training_table import training_table


def rows_page(kind: Kind, shown: Rows) -> Iterator[RenderableType]:
    if kind == "head":
        yield from training_table(shown)
    elif kind == "report":
        yield from report_tables(shown)
    else:
        yield Legend(shown.note)
        for row in shown.rows:
            yield Text()
            yield Rule(Text(f"row {_number(row)}", style="bold"), align="left", style="dim")
            if isinstance(row, ConversationRow):
                yield from _conversation(row)
            elif isinstance(row, FeatureRow):
                yield from _features(row)


def _number(row: object) -> int:
    return row.row if isinstance(row, ConversationRow | FeatureRow) else 0


def _conversation(row: ConversationRow) -> Iterator[RenderableType]:
    about = [row.id, f"from {row.source}", row.category, row.license]
    ended = "cut at the longest answer allowed" if row.finish_reason == "length" else "ended by the target"
    yield Text(printable(", ".join(filter(None, about))), style="dim")
    yield Text(f"{_counted(row.tokens, row.supervised_tokens)}, {ended}", style="dim")
    if row.text is not None:
        yield SampledText(row.text)
        return
    for message in row.messages:
        role, content = printable(str(message.get("role"))), printable(str(message.get("content")))
        yield Text.assemble((f"{role}: ", "bold"), content)
    yield SampledText.of_ids(row.input_ids, row.loss_mask)


def _features(row: FeatureRow) -> Iterator[RenderableType]:
    states = several(row.supervised_positions, "last state")
    if row.argmax_is_label is not None:
        states += f", the target's first choice being the next token at {row.argmax_is_label:.1%} of them"
    counted = _counted(row.tokens, row.supervised_tokens)
    yield Text(f"conversation {row.id}, {counted}; {states}", style="dim")
    if row.text is not None:
        yield SampledText(row.text)
    else:
        yield SampledText.of_ids(row.input_ids, row.loss_mask)
    yield _norms(row.norms)


def _counted(tokens: int, sampled: int) -> str:
    return f"{several(tokens, 'token')}, {sampled:,} of them sampled"


def _norms(norms: list[Norms]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan")
    for _ in range(4):
        table.add_column(justify="right")
    table.add_row(*(Text(head, style="dim") for head in ("norms", "states", "least", "mean", "greatest")))
    for each in norms:
        cells = [Text(_figure(number)) for number in (each.least, each.mean, each.greatest)]
        bad = Text(f"{each.not_finite:,} not finite", style="bold red") if each.not_finite else Text()
        table.add_row(each.name, Text(f"{each.states:,}"), *cells, bad)
    return table


def _figure(number: float | None) -> str:
    return "-" if number is None else f"{number:,.4g}"
