"""Token ids as text that shows which tokens the target sampled itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from pydantic import BaseModel

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Segment(BaseModel):
    """Consecutive tokens of one kind as text."""

    text: str
    supervised: bool


def segments(tokenizer: Any, ids: Sequence[int], loss_mask: Sequence[int]) -> list[Segment]:
    """The text of ids, special tokens included, cut where `loss_mask` (of the same length) changes.

    Joined, the pieces are the text of all ids. A tokenizer that drops the space at the start of a text, or
    whose character has bytes on both sides of a cut, would not give that for each piece alone.
    """
    whole = _decode(tokenizer, ids)
    found: list[Segment] = []
    end = begin = 0
    for sampled, run in groupby(loss_mask, key=bool):
        end += len(list(run))
        cut = _shared(whole, _decode(tokenizer, ids[:end]))
        found.append(Segment(text=whole[begin:cut], supervised=sampled))
        begin = cut
    return found


def _shared(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def printable(text: str) -> str:
    """`text` without anything that would steer a terminal: escapes instead of control characters."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
