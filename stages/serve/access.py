"""Who may ask, and how much: the API key and the limit of a body, as layers around the application."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Sequence

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stages.serve.api_error import ApiError

Refused = Callable[[ApiError, Scope], JSONResponse]
"""Told of a request that is refused; makes the answer."""

GUARDED = ("/v1/", "/tokenize", "/detokenize")
HOLDER = "eagle.key"


def client_of(scope: Scope) -> str:
    """Who sends a request: the holder of one of several keys, else an address. Of IPv6 the network counts."""
    if (holder := scope.get(HOLDER)) is not None:
        return f"key {holder}"
    address = (scope.get("client") or ("",))[0]
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:  # how a socket of both kinds spells an address of IPv4
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, 64), strict=False))


class ApiKey:
    """Refuses requests of the API that do not bring a key as their bearer token.

    Where there are several keys, they tell clients apart.

    Args:
        refused: told of each that is refused.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], refused: Refused) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        holder = self._holder(scope) if scope["type"] == "http" else None
        if len(self._keys) > 1:
            scope[HOLDER] = holder
        if scope["type"] == "http" and scope["path"].startswith(GUARDED) and holder is None:
            error = ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
            )
            response = self._refused(error, scope)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _holder(self, scope: Scope) -> int | None:
        """The number of the key that a request brings."""
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return None
        right = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
        return right.index(True) if any(right) else None


class BodyLimit:
    """Refuses bodies of more than `limit` bytes, by what they announce and by what comes."""

    def __init__(self, app: ASGIApp, limit: int, refused: Refused) -> None:
        self._app = app
        self._limit = limit
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._limit:
            await self._refused(self.error(self._limit), scope)(scope, receive, send)
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
