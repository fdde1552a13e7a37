"""A report's table and its requests."""

from __future__ import annotations

from typing import Any

from stages.errors import EagleError
from stages.inspect.place import Place
from stages.inspect.selection import Selection
from stages.inspect.training_log import read_json

REPORT = "report.json"


def bench_report(place: Place, selection: Selection) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """The report without its requests, the chosen requests, and which they are.

    Raises:
        EagleError: there is no report, it is not JSON, or it has no such requests.
    """
    if selection.id is not None:
        raise EagleError(f"--row is for conversations and features; {place.uri} is a report: use --rows")
    report = read_json(place, REPORT)
    requests = report.pop("requests", [])
    if not isinstance(requests, list) or not all(isinstance(request, dict) for request in requests):
        raise EagleError(f"{place.uri}/{REPORT} is not a report of eagle bench")
    chosen = requests[selection.start : selection.start + selection.count]
    if not chosen and requests:
        raise selection.nothing(place.uri, len(requests))
    last = selection.start + len(chosen) - 1
    return report, chosen, f"requests {selection.start} to {last} of {len(requests):,}"
