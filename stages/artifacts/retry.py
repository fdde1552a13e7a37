"""Trying again what a store could not do for the moment."""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

from stages.artifacts.uri import storage_errors
from stages.errors import EagleError

RETRY_S = 120.0
"""Seconds for which a request is repeated while a store is busy or silent, unless EAGLE_RETRY_S is set.

gcsfs itself sends a request six times within about half a minute; this goes round that until the time is up.
"""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 16.0
_BUSY = ("408", "410", "429", "500", "502", "503", "504")  # 410: a session of an upload is over
_BUSY_ERRNOS = (errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EBUSY))  # as s3fs calls answers 503 and 500
_NETWORK_PACKAGES = ("aiohttp", "requests", "urllib3")

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def retried(uri: str, action: Callable[[], _T]) -> _T:
    """What `action` returns, tried again with growing pauses while it fails with what passes by itself.

    Args:
        uri: what the action is about, for messages.

    Raises:
        EagleError: storage fails in a way that does not pass, or for longer than `RETRY_S`.
    """
    until, pause = time.monotonic() + _patience(), _FIRST_PAUSE_S
    while True:
        try:
            with storage_errors(uri):
                return action()
        except EagleError as error:
            left = until - time.monotonic()
            if not passes(error.__cause__) or pause > left:
                raise
            _log.warning("%s; trying again for up to %.0f s", error, left)
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _patience() -> float:
    text = os.environ.get("EAGLE_RETRY_S")
    try:
        return float(text) if text else RETRY_S
    except ValueError:
        raise EagleError(f"EAGLE_RETRY_S is {text!r}: give a number of seconds, such as 60") from None


def passes(error: BaseException | None) -> bool:
    """Whether an error of a remote store is likely to be gone in a while: busy, restarted, or cut off."""
    if error is None or isinstance(error, ValueError):
        return False
    if isinstance(error, FileNotFoundError):
        return "upload_id=" in str(error)  # the session of an upload in parts is over; another begins anew
    status = str(getattr(error, "code", None) or getattr(error, "status", None) or "")
    if status[:1] in ("4", "5"):
        return status in _BUSY
    package = type(error).__module__.split(".")[0]
    return (
        isinstance(error, ConnectionError | TimeoutError)
        or package in _NETWORK_PACKAGES
        or getattr(error, "errno", None) in _BUSY_ERRNOS
        or type(error).__name__ == "ChecksumError"
        or getattr(error, "retryable", False) is True
    )
