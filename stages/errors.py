"""The one exception for what a user can cause, and the one warning: the CLI prints either in one line."""

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


class EagleWarning(UserWarning):
    """What a user should know although the command goes on; the CLI shows no warning of another kind."""
