"""The one exception for what a user can cause; the CLI prints it in one line and exits with 1."""

from __future__ import annotations

from typing import Any


class EagleError(Exception):
    """Something the user can fix: bad input, a missing file, mismatched artifacts, no disk left.

    The message is one line that says what was wrong, the value, and what to do about it.
    Any other exception that leaves a stage is a bug and shows its traceback.

    Attributes:
        result: what the stage found all the same, of the kind that it returns otherwise; shown before
            the line.
    """

    def __init__(self, message: str, *, result: Any = None) -> None:
        super().__init__(message)
        self.result = result
