"""An artifact as a page for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stages.artifacts import STAGE_OF_KIND, Shard
from stages.config import several
from stages.inspect.figures import count, digest, flat, setting, size, when
from stages.inspect.lineage_tree import lineage_tree
from stages.inspect.result import InspectResult
from stages.inspect.rows_page import rows_page
from stages.inspect.sources import maker
from stages.inspect.text import printable

HOLDS_ROWS = ("conversations", "features")
SHARDS_SHOWN = 8
LABEL_WIDTH = 8


def page(result: InspectResult) -> RenderableType:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold cyan", min_width=LABEL_WIDTH)
    facts.add_column(overflow="fold")
    for label, content in _facts(result):
        facts.add_row(label, content)
    parts: list[RenderableType] = [*_title(result), Text(), facts]
    if result.shown is not None:
        parts += [Text(), *rows_page(result.kind, result.shown)]
    return Group(*parts)


def _title(result: InspectResult) -> Iterator[Text]:
    yield Text.assemble((result.kind, "bold"), "  ", (printable(result.uri), "bold"))
    if result.state == "complete":
        state = Text("complete", style="green")
        made = f", made {when(result.created)} by eagle {printable(result.tool_version)}"
        state.append(made, style="default")
    elif result.state == "parts":
        ready = sum(part.state == "complete" for part in result.parts)
        state = Text(f"in parts, {ready} of {len(result.parts)} complete", style="yellow")
        state.append(f": {_next(result)}", style="default")
    else:
        state = Text("unfinished", style="yellow")
        state.append(f", {_writer(result)}", style="default")
    yield state


def _writer(result: InspectResult) -> str:
    again = f"the same eagle {maker(result.kind, result.config)} command continues it"
    writer = result.writer
    if writer is None:
        return f"its run was stopped; {again}"
    who = f"process {writer.pid} on {printable(writer.host)}"
    if writer.alive is None:
        return f"last written by {who}; whether that still runs cannot be seen from here"
    return f"{who} is writing it" if writer.alive else f"{who} was writing it and has ended; {again}"


def _facts(result: InspectResult) -> Iterator[tuple[str, RenderableType]]:
    yield "size", Text(_size(result))
    if result.parts:
        yield "parts", _parts(result)
    yield "checked", _checked(result)
    if result.digest:
        yield "digest", Text(result.digest)
    if result.target is not None:
        yield "target", _target(result)
    yield "lineage", lineage_tree(result)
    counts = {key: item for key, item in result.counts.items() if key != "sources" or not result.sources}
    if counts:
        yield "counts", _pairs(counts, count)
    if result.config:
        yield "config", _pairs(result.config, setting)
    if result.shards:
        yield "shards", _files(result.shards, rows=True)
    if result.files:
        yield "files", _files(result.files, rows=False)


def _size(result: InspectResult) -> str:
    rows = f" with {several(result.rows, 'row')}" if result.kind in HOLDS_ROWS else ""
    shards = [f"{several(len(result.shards), 'shard')}{rows}"] if result.shards or rows else []
    others = len(result.files)
    files = [several(others, "other file" if shards else "file")] if others else []
    done = "" if result.state == "complete" else " so far"
    return f"{size(result.bytes)}{done}: {', '.join([*shards, *files]) or 'no files'}"


def _next(result: InspectResult) -> str:
    command, of = f"eagle {STAGE_OF_KIND[result.kind]}", f"--num-shards {len(result.parts)}"
    if all(part.state == "complete" for part in result.parts):
        return f"{command} with {of} and no --shard-index merges them"
    return f"{command} with {of} and --shard-index makes the others"


def _parts(result: InspectResult) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for state, style in (("complete", "green"), ("unfinished", "yellow"), ("missing", "red")):
        numbers = [part.index for part in result.parts if part.state == state]
        if numbers:
            table.add_row(Text(state, style=style), _ranges(numbers))
    return table


def _ranges(numbers: list[int]) -> str:
    """`0-3, 7` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _target(result: InspectResult) -> Text:
    target = result.target
    assert target is not None
    digests = {
        "config": target.config,
        "tokenizer": target.tokenizer,
        "template": target.chat_template,
        "weights": target.weights,
    }
    shown = ", ".join(f"{part} {digest(sha256)}" for part, sha256 in digests.items())
    return Text.assemble(f"{printable(target.name)} in {printable(target.dtype)}\n", (shown, "dim"))


def _pairs(content: Mapping[str, Any], show: Callable[[Any], str]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for key, item in flat(content):
        long = isinstance(item, list) and any(isinstance(each, str | dict) for each in item)
        table.add_row(Text(key), Text("\n".join(map(show, item if long else [item]))))
    return table


def _files(entries: list[Shard], *, rows: bool) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    for _ in range(1 + rows):
        table.add_column(justify="right")
    table.add_column(style="dim")
    left_out = len(entries) - SHARDS_SHOWN
    head = entries if left_out <= 1 else entries[: SHARDS_SHOWN - 2]
    for entry in head:
        table.add_row(*_cells(entry, rows))
    if len(head) < len(entries):
        table.add_row(Text(f"... {len(entries) - len(head) - 2:,} more ...", style="dim"))
        for entry in entries[-2:]:
            table.add_row(*_cells(entry, rows))
    return table


def _cells(entry: Shard, rows: bool) -> list[Text]:
    counted = [Text(several(entry.rows, "row"))] if rows else []
    return [Text(printable(entry.path)), *counted, Text(size(entry.bytes)), Text(digest(entry.sha256))]


def _checked(result: InspectResult) -> Text:
    checked = result.checked
    what = f"{'content' if checked.digests else 'sizes'} of {several(checked.files, 'file')}"
    if not checked.faults:
        more = "" if checked.digests else " (--verify reads them)"
        return Text.assemble(f"{what}: ", ("as written", "green"), more)
    text = Text(f"{what}: ").append(f"{len(checked.faults):,} not as written", style="red")
    for fault in checked.faults:
        text.append(f"\n{printable(fault.path)} {printable(fault.problem)}", style="red")
    return text
