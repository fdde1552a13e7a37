"""Who may ask, and how much: the API key and the limit of a body, as layers around the application."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stages.serve.api_error import ApiError

GUARDED = "/v1/"


class ApiKey:
    """Refuses requests below `/v1` that do not bring the key as their bearer token.

    Args:
        refused: told of each that is refused.
    """

    def __init__(self, app: ASGIApp, key: str, refused: Callable[[ApiError], JSONResponse]) -> None:
        self._app = app
        self._key = key.encode()
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(GUARDED) and not self._knows(scope):
            error = ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
            )
            response = self._refused(error)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)


class BodyLimit:
    """Refuses bodies of more than `limit` bytes, by what they announce and by what comes."""

    def __init__(self, app: ASGIApp, limit: int, refused: Callable[[ApiError], JSONResponse]) -> None:
        self._app = app
        self._limit = limit
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._limit:
            await self._refused(self.error(self._limit))(scope, receive, send)
            return
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit:
                raise HTTPException(413, self.error(self._limit).message)
            return message

        await self._app(scope, limited, send)

    @staticmethod
    def error(limit: int) -> ApiError:
        """What is answered."""
        return ApiError(
            413, f"the body is longer than {limit} bytes; send less at a time", code="request_too_large"
        )
