"""What page buttons left at the end of messages in ShareGPT files, whose texts were copied from web pages."""

from __future__ import annotations

import re

_LABELS = re.compile(
    r"\s*(?:Share Prompt|Translate now|지금 번역하기|Save & SubmitCancel"
    r"|CopyCopy HTML\s*Read Aloud.{0,20}?\d+ chars? \| \d+ words?)\s*$",
    re.DOTALL,
)
_VERSIONS = re.compile(
    r"(?:(?<=[^\W\d])|(?<=[.,;:?!\"'\u201d\u2019)\]}\u2026`])|\n\s*)(\d{1,2}) / (\d{1,2})\s*$"
)
"""The counter `1 / 2` of an edited message: directly behind its text, or on a line of its own."""

_SHARED = re.compile(r"\*?This (?:chat )?conversation is shared from \[.*", re.DOTALL)
_LONGEST = 200


def without_buttons(text: str) -> str:
    """`text` without the labels of buttons, and the counter of versions, that follow it."""
    while True:
        start = max(0, len(text) - _LONGEST)
        found = _LABELS.search(text, start)
        if not found and (found := _VERSIONS.search(text, start)) and int(found[1]) > int(found[2]):
            return text
        if not found:
            return text
        text = text[: found.start()]


def is_page_note(text: str) -> bool:
    """Whether a system message says only where a page was shared from."""
    return _SHARED.fullmatch(text.strip()) is not None
