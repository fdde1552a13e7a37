"""Text as a tokenizer can take it, and whether anyone can see it."""

from __future__ import annotations

import unicodedata

_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0") | {
    chr(code) for code in (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))
}
"""What shows nothing though its category says that it does: fillers, empty braille, variation selectors."""


def is_blank(text: str) -> bool:
    """Whether there is nothing to see: blanks, control characters, zero-width ones and fillers at most."""
    return not any(unicodedata.category(c)[0] not in "CZ" and c not in _INVISIBLE for c in text)


def encodable(text: str) -> str:
    """`text` with lone surrogates (half of an emoji cut in two by a JSON escape) replaced: UTF-8 has none."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def one_line(text: object, most: int = 200) -> str:
    """`text` on one line, cut at a number of characters, without what would move a terminal's cursor."""
    shown = "".join(c if c.isprintable() else " " for c in str(text)[: 2 * most])
    shown = " ".join(shown.split())
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."
