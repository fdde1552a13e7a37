"""How many requests one client may send in a minute."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from stages.serve.access import GUARDED, Refused, client_of
from stages.serve.api_error import ApiError

WINDOW_S = 60.0
KEPT = 1024  # clients that are remembered before those of long ago are forgotten


class RequestRate:
    """Counts the requests of each client in the last minute.

    Args:
        limit: how many may be in any minute.
        clock: seconds, only going forward.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._taken: dict[str, deque[float]] = {}

    def take(self, client: str) -> float:
        """Counts a request; or returns the seconds after which there is room for it, and does not."""
        now = self._clock()
        if len(self._taken) > KEPT:
            self._taken = {name: times for name, times in self._taken.items() if times[-1] > now - WINDOW_S}
        times = self._taken.setdefault(client, deque())
        while times and times[0] <= now - WINDOW_S:
            times.popleft()
        if len(times) >= self._limit:
            return times[0] + WINDOW_S - now
        times.append(now)
        return 0.0


class RateLimit:
    """Refuses what a client posts to the API beyond its rate, before the body is read."""

    def __init__(self, app: ASGIApp, limit: int, refused: Refused) -> None:
        self._app = app
        self._limit = limit
        self._rate = RequestRate(limit)
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(GUARDED):
            wait = math.ceil(self._rate.take(client_of(scope)))
            if wait > 0:
                error = ApiError(
                    429,
                    f"this server takes {self._limit} requests a minute of one client; try again in {wait} s",
                    kind="rate_limit_error",
                    code="rate_limit_exceeded",
                    retry_after=wait,
                )
                await self._refused(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)
