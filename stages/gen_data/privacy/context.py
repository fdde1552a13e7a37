"""The words around a stretch of text: what tells a phone number from any other number."""

from __future__ import annotations

import regex

BEFORE, AFTER = 60, 25
"""How many characters on either side of a stretch count as its surroundings."""

MATCH_S = 5.0
"""Longest time, in seconds, that one expression may search one text."""

_MATHS_BEFORE = regex.compile(
    r"(?:[=^%\u00d7\u00f7<>]|[\w)\]]\s*\*|(?<!\S)[-+/]|\b(?:calculate|compute|evaluate|simplify|solve|"
    r"subtract|add|minus|plus|"
    r"times|divided by|what(?:'s|\u2019s| is)|(?:result|value) of))\s*\(?\Z",
    regex.IGNORECASE,
)
_MATHS_AFTER = regex.compile(
    r"\)?(?:\s*(?:[=^%\u00d7\u00f7]|\*\s*[\w(])|\s[-+/]\s|\s*(?:minus|plus|times|divided)\b)"
)


def before(text: str, start: int, size: int = BEFORE) -> str:
    """The surroundings in front of a stretch, whole words of them."""
    begin = max(0, start - size)
    if begin and text[begin - 1].isalnum():
        while begin < start and text[begin].isalnum():
            begin += 1
    return text[begin:start]


def after(text: str, end: int) -> str:
    """The surroundings behind a stretch, up to the end of its line."""
    return text[end : end + AFTER].partition("\n")[0]


def words(*alternatives: str) -> regex.Pattern[str]:
    """Any of some words, as a whole; those in scripts without spaces between words anywhere."""
    spaced = [word for word in alternatives if word.isascii() or word[0] < "\u0e00"]
    joined = [word for word in alternatives if word not in spaced]
    expression = rf"(?<![^\W_])(?:{'|'.join(spaced)})(?![^\W_])"
    return regex.compile("|".join([expression, *joined]), regex.IGNORECASE)


def last_end(pattern: regex.Pattern[str], text: str) -> int:
    """Where the last match ends; -1 without one."""
    end = -1
    for match in pattern.finditer(text, timeout=MATCH_S):
        end = match.end()
    return end


def looks_like_maths(text: str, start: int, end: int) -> bool:
    """Whether a stretch of digits and signs is a term of something to calculate."""
    ahead = text[max(0, start - 20) : start]
    return bool(
        _MATHS_BEFORE.search(ahead, timeout=MATCH_S) or _MATHS_AFTER.match(text, end, timeout=MATCH_S)
    )
