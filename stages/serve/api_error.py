"""Errors as OpenAI's API words them: a status, and a body {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from reprlib import Repr
from typing import Any

VALUE_SHOWN = 80
MESSAGE_SHOWN = 500
PARAM_SHOWN = 200


class ApiError(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: HTTP status.
        message: what was wrong, the value, and what to do about it; one line, whatever the request was.
        kind: OpenAI's class of the error, the `type` of the body.
        param: the field of the request that is at fault, if one is.
        code: the error's fixed name, for programs.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        message = one_line(message, MESSAGE_SHOWN)
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = None if param is None else one_line(param, PARAM_SHOWN)
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """The headers of the response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def shown(value: Any) -> str:
    """A value as a message shows it, cut to a readable length. Reads no more of it than is shown."""
    return one_line(_SHORT.repr(value).encode("ascii", "backslashreplace").decode(), VALUE_SHOWN)


def one_line(text: str, most: int) -> str:
    """Text cut to `most` characters, with what does not print or breaks the line written as escapes."""
    escaped = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: most + 1])
    return escaped if len(escaped) <= most else escaped[: most - 3] + "..."


_SHORT = Repr()
_SHORT.maxlevel = 6
_SHORT.maxlist = _SHORT.maxdict = 12
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 2 * VALUE_SHOWN + 8  # its cut is in the middle
