"""Texts of our own with every finding marked, and texts that must have none: what the search is measured by.

In `data/labelled.jsonl` a finding stands as `⟦ENTITY:text⟧`. A broken bar may stand anywhere and is taken out
on reading: it keeps those who scan source code for secrets from taking our made-up ones for real.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources

_MARKED = re.compile(r"⟦([A-Z_]+):(.*?)⟧", re.DOTALL)
_BROKEN = "¦"


@dataclass(frozen=True)
class Case:
    """A text, the findings in it as (entity, start, end), and for a text without any what it is a trap
    for."""

    text: str
    expected: tuple[tuple[str, int, int], ...]
    trap: str = ""


def read_cases() -> list[Case]:
    """All cases, in the order of the file."""
    file = resources.files("stages.gen_data.privacy") / "data" / "labelled.jsonl"
    # Split at newlines only: the texts may have characters that str.splitlines takes for line ends.
    rows = [json.loads(line) for line in file.read_text("utf-8").split("\n") if line]
    return [_case(row["text"].replace(_BROKEN, ""), row.get("trap", "")) for row in rows]


def _case(marked: str, trap: str) -> Case:
    text, expected, place = "", [], 0
    for match in _MARKED.finditer(marked):
        text += marked[place : match.start()]
        expected.append((match[1], len(text), len(text) + len(match[2])))
        text += match[2]
        place = match.end()
    return Case(text + marked[place:], tuple(expected), trap)
