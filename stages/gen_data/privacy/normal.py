"""The normal form of a text, in which personal data cannot hide behind look-alike or invisible characters."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import regex

_PLAIN = re.compile(r"(?:[\t\n\r\x20-\x5b\x5d-\x7e]|\\(?![_@]))*")
_UNUSUAL = regex.compile(
    r"[[\p{Cf}\p{Cc}\p{Pd}\p{Nd}\p{Mn}]--[\t\n\r\x0b\x0c\x85\-0-9]]|\\+[_@]|[\u2212\u115f\u1160\u3164]",
    regex.VERSION1,
)
"""What may change also in a text that is in Unicode's normal form."""

_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u3164\uffa0") | {
    chr(c) for c in (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
}
_MINUS = "\u2212"
_ESCAPED = ("_", "@")
_KEPT_CONTROLS = "\t\n\r\x0b\x0c\x85"


@dataclass(frozen=True)
class NormalText:
    """A text to scan, and where each of its characters came from.

    Attributes:
        text: the normal form.
        starts, ends: for each of its characters, the stretch [start, end) of the original that it stands for;
            None when the original is its own normal form.
    """

    text: str
    starts: Sequence[int] | None = None
    ends: Sequence[int] | None = None

    def original(self, start: int, end: int) -> tuple[int, int]:
        """The stretch of the original that [start, end) of the normal form, not empty, came from."""
        if self.starts is None or self.ends is None:
            return start, end
        return self.starts[start], self.ends[end - 1]


def normalise(text: str) -> NormalText:
    r"""Unicode's NFKC without invisible characters, with ASCII digits and hyphens for others of their kind.

    Nor with the backslash that Markdown puts before an underscore, and Perl before an at sign.
    """
    if _PLAIN.fullmatch(text) or (unicodedata.is_normalized("NFKC", text) and not _UNUSUAL.search(text)):
        return NormalText(text)
    out: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    start = 0
    while start < len(text):
        end = _end_of_cluster(text, start)
        shown = _character(text[start]) if end == start + 1 else _cluster(text[start:end])
        if shown[:1] in _ESCAPED:
            while out and out[-1] == "\\":
                del out[-1], starts[-1], ends[-1]
        out += shown
        starts += [start] * len(shown)
        ends += [end] * len(shown)
        start = end
    whole = "".join(out)
    return NormalText(text) if whole == text else NormalText(whole, starts, ends)


def _end_of_cluster(text: str, start: int) -> int:
    """Where a character ends with the marks that combine with it, whatever invisible stands between."""
    end = place = start + 1
    if not _character(text[start]):
        return end
    while place < len(text) and (unicodedata.combining(text[place]) or not _character(text[place])):
        place += 1
        if unicodedata.combining(text[place - 1]):
            end = place
    return end


@lru_cache(maxsize=8192)
def _character(c: str) -> str:
    category = unicodedata.category(c)
    if category == "Cf" or c in _INVISIBLE or (category == "Cc" and c not in _KEPT_CONTROLS):
        return ""
    if category == "Pd" or c == _MINUS:
        return "-"
    if category == "Nd":
        return str(unicodedata.decimal(c))
    return unicodedata.normalize("NFKC", c)


def _cluster(text: str) -> str:
    """A character with the marks that combine with it, as one where Unicode has one."""
    return unicodedata.normalize("NFKC", "".join(c for c in text if _character(c)))
