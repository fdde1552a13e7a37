"""Stop strings in a stream: text that may turn out to belong to one is held back until that is certain."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes an answer's text on up to the first stop string, which it swallows with everything after it.

    The first is the one that is complete first, of two that end together the longer: so what is passed on
    does not depend on how the text was cut into pieces.

    Args:
        shown: passes the stop string itself on too.

    Attributes:
        found: the stop string that has been seen, None while none has.
    """

    def __init__(self, stops: Sequence[str], *, shown: bool = False) -> None:
        self._stops = tuple(stops)
        self._shown = shown
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Takes the next piece of text; returns what may be shown now."""
        if self.found is not None:
            return ""
        text = self._held + piece
        # (end, start, string) of the first place of each
        places = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if places:
            end, start, self.found = min(places)
            self._held = ""
            return text[: end if self._shown else start]
        certain = len(text) - max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Returns the text still held: the answer has ended, so it belongs to no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` starts with, short of all of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
