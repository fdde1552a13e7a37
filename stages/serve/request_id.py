"""The name of a request: the client's own if it gives a sane one, told back and written to the log."""

from __future__ import annotations

import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Id"
SANE = re.compile(r"[!-~]{1,128}")
_KEY = "eagle.request"


def request_id(scope: Scope) -> str:
    """The name of a request that has come through `RequestId`."""
    return scope[_KEY]


class RequestId:
    """Names every request, and says its name in the answer's headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        name = scope[_KEY] = given if SANE.fullmatch(given) else secrets.token_hex(8)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = name
            await send(message)

        await self._app(scope, receive, named)
