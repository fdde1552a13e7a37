"""One row of a source as it is found, before anyone has looked at its shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stages.prompts.prompt import Reason, Rejected

LONGEST_ROW = 1 << 28
"""Most bytes or characters of one row, a quarter of a gigabyte: a file without line ends, or with a quote
that nothing closes, must not take all memory."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row and its place.

    Attributes:
        name: `<file name>:<number>`, the id of rows that have none of their own.
        where: the place in words, such as "chat.jsonl, line 3".
        value: what is there, or why it cannot be read.
    """

    name: str
    where: str
    value: Any | Rejected


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that cannot be read, while those behind it can."""

    reason: Reason
    detail: str


class BrokenOffError(Exception):
    """From here on nothing can be read: a file ends too early, or is not what its name says.

    Attributes:
        reason: the name that it is counted under.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
