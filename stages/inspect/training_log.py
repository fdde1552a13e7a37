"""What training measured: the lines of a head's `metrics.jsonl`, and its `metrics.json` as a whole."""

from __future__ import annotations

import json
from typing import Any

from stages.config import several
from stages.errors import EagleError
from stages.inspect.place import Place
from stages.inspect.selection import Selection

METRICS, LOG = "metrics.json", "metrics.jsonl"


def training_log(place: Place, selection: Selection) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """The totals, the chosen lines of the log, and how they were chosen.

    Without a start, the lines are spread evenly over the whole training, the last one among them.

    Raises:
        EagleError: the head has no such files, or they are not JSON.
    """
    totals, lines = read_json(place, METRICS), read_json_lines(place, LOG)
    if selection.id is not None:
        raise EagleError(f"--row is for conversations and features; {place.uri} is a head: use --rows")
    if selection.start:
        chosen = lines[selection.start : selection.start + selection.count]
        if not chosen:
            raise selection.nothing(place.uri, len(lines))
        return totals, chosen, f"lines {selection.start} to {selection.start + len(chosen) - 1} of {LOG}"
    chosen = [lines[i] for i in evenly(len(lines), selection.count)]
    return totals, chosen, f"{len(chosen)} of {several(len(lines), 'line')} of {LOG}, evenly spaced"


def evenly(total: int, count: int) -> list[int]:
    """`count` of the numbers below `total`, evenly spaced, the last among them; all if there are not more."""
    if count >= total:
        return list(range(total))
    return [(i + 1) * total // count - 1 for i in range(count)]


def read_json(place: Place, name: str) -> dict[str, Any]:
    try:
        content = json.loads(place.artifact.read(name))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise EagleError(f"{place.uri}/{name} is not a JSON object")
    return content


def read_json_lines(place: Place, name: str) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in place.artifact.read(name).splitlines() if line.strip()]
    except ValueError:
        lines = [None]
    if not all(isinstance(line, dict) for line in lines):
        raise EagleError(f"{place.uri}/{name} does not hold a JSON object a line")
    return lines
