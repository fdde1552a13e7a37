"""Errors as OpenAI's API words them: a status, and a body {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

VALUE_SHOWN = 80


class ApiError(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: HTTP status.
        message: what was wrong, the value, and what to do about it.
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
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """The headers of the response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def shown(value: Any) -> str:
    """A value as a message shows it, cut to a readable length."""
    text = ascii(value)
    return text if len(text) <= VALUE_SHOWN else text[: VALUE_SHOWN - 3] + "..."
