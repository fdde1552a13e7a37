"""What finds personal data in texts, whichever engine does it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stages.gen_data.privacy.finding import Finding
from stages.gen_data.privacy.rules import Search

TOO_LONG, TIMEOUT, ERROR = "too_long", "timeout", "error"


@dataclass(frozen=True, slots=True)
class Unscannable:
    """A text that could not be searched, and so must not pass.

    Attributes:
        reason: TOO_LONG, TIMEOUT or ERROR.
        error: the type of the error, never its message, which may quote the text.
    """

    reason: str
    error: str = ""


Scan = list[Finding] | Unscannable
"""What came of one text: findings in order that do not overlap, or why there are none to be had."""


class Detector(Protocol):
    """Finds personal data. Nothing it returns, raises or logs holds any of a text."""

    def scan(self, texts: Sequence[str]) -> list[Scan]:
        """One result a text, in their order.

        Raises:
            EagleError: no text can be searched, such as without a connection to a service.
        """
        ...


def make_detector(search: Search) -> Detector:
    """Raises EagleError: an entity is unknown, a model or a package is missing, a service refuses."""
    # presidio goes on without an expression that takes longer than this. Read when it is imported.
    os.environ.setdefault("REGEX_TIMEOUT_SECONDS", "10")
    if search.engine == "dlp":
        from stages.gen_data.privacy.dlp import DlpDetector

        return DlpDetector(search)
    from stages.gen_data.privacy.analyzer import PresidioDetector

    return PresidioDetector(search)
