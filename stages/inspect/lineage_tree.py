"""The lineage as a tree for people."""

from __future__ import annotations

from rich.text import Text
from rich.tree import Tree

from stages.artifacts import Kind
from stages.config import several
from stages.inspect.figures import digest
from stages.inspect.lineage import Ancestor
from stages.inspect.result import InspectResult
from stages.inspect.sources import Source
from stages.inspect.text import printable

_STYLES = {
    "unchanged": "green",
    "changed": "red",
    "unfinished": "yellow",
    "missing": "yellow",
    "unreadable": "yellow",
}


def lineage_tree(result: InspectResult) -> Tree:
    root = Tree(_name(result.kind, result.uri), guide_style="dim")
    _grow(root, result.kind, result.parents, result.sources)
    return root


def _grow(tree: Tree, kind: Kind, parents: list[Ancestor], sources: list[Source]) -> None:
    holds_prompts = kind in ("conversations", "report")
    for parent in parents:
        label = _name(parent.kind, parent.uri)
        label.append(f"  {digest(parent.digest)}  ", style="dim")
        label.append(_state(parent), style=_STYLES[parent.state])
        if isinstance(rows := parent.counts.get("rows"), int):
            label.append(f"  {several(rows, 'row')}", style="dim")
        _grow(tree.add(label), parent.kind, parent.parents, parent.sources)
    for source in sources:
        tree.add(_source(source, holds_prompts))


def _name(kind: str, uri: str) -> Text:
    return Text.assemble((kind, "bold"), "  ", printable(uri))


def _state(parent: Ancestor) -> str:
    if parent.state == "unchanged":
        moved = parent.found_at if parent.found_at not in (None, parent.uri) else None
        return f"unchanged, now at {printable(moved)}" if moved else "unchanged"
    if parent.state == "changed":
        return f"replaced by another, {digest(parent.found_digest or '')}"
    if parent.state == "unfinished":
        return "an unfinished one is there"
    if parent.state == "missing":
        return "no longer there"
    return f"cannot be read: {printable(parent.problem)}"


def _source(source: Source, holds_prompts: bool) -> Text:
    label = Text.assemble(("prompts" if holds_prompts else "source", "bold"), "  ", printable(source.name))
    if source.rows is not None:
        of = f" of {source.read:,}" if source.read is not None and source.read != source.rows else ""
        label.append(f"  {source.rows:,}{of} {'row' if source.rows == 1 and not of else 'rows'}")
    if source.license:
        label.append(f"  {printable(source.license)}", style="cyan")
    if source.left_out:
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in source.left_out.items())
        label.append(f"  left out: {printable(reasons)}", style="dim")
    return label
