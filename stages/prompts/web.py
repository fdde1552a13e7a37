"""Files of web servers, read from first to last as they arrive, whatever the server can do besides."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import IO
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError, MaxRetryError

from stages.errors import EagleError
from stages.prompts.streams import CHUNK, stream
from stages.prompts.text import one_line

SCHEMES = ("http://", "https://")
CONNECT_S, READ_S = 10.0, 60.0
"""Longest waits, in seconds: for a connection, and for the next bytes."""

_BUSY = (429, 500, 502, 503, 504)
_TRIES, _REDIRECTS, _PAUSE_S = 3, 10, 0.5


@contextmanager
def open_web(url: str) -> Iterator[IO[bytes]]:
    """The content at an address, to be read once.

    Raises:
        EagleError: there is none, the server refuses, does not answer, or breaks off.
    """
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it prints every try
    with _manager(url) as manager:
        try:
            response = manager.request("GET", url, preload_content=False, decode_content=False)
        except (HTTPError, ValueError) as error:
            cause = error.reason if isinstance(error, MaxRetryError) and error.reason else error
            problem = f"{url} cannot be reached ({_words(cause)})"
            raise EagleError(f"{problem}: check the address and the network") from None
        try:
            if response.status != HTTPStatus.OK:
                raise EagleError(f"{url} cannot be read: the server answers {_status(response.status)}")
            yield stream(lambda: _read(response, url))
        finally:
            response.close()


def _manager(url: str) -> urllib3.PoolManager:
    retries = urllib3.Retry(
        total=None,
        connect=1,
        read=1,
        status=_TRIES,
        redirect=_REDIRECTS,
        backoff_factor=_PAUSE_S,
        backoff_max=CONNECT_S,
        status_forcelist=_BUSY,
        raise_on_status=False,
        respect_retry_after_header=False,  # a server may ask for hours
    )
    timeout = urllib3.Timeout(connect=CONNECT_S, read=READ_S)
    place = urlsplit(url)
    proxy = urllib.request.getproxies().get(place.scheme)
    if proxy and not urllib.request.proxy_bypass(place.hostname or ""):
        return urllib3.ProxyManager(proxy, retries=retries, timeout=timeout)
    return urllib3.PoolManager(retries=retries, timeout=timeout)


def _read(response: urllib3.BaseHTTPResponse, url: str) -> bytes:
    try:
        return response.read(CHUNK)
    except (HTTPError, OSError) as error:
        raise EagleError(f"{url} breaks off ({_words(error)}): run the same command again") from None


def _status(code: int) -> str:
    names = {status.value: status.phrase for status in HTTPStatus}
    return f"{code} {names.get(code, '')}".strip()


def _words(error: BaseException) -> str:
    return one_line(error.args[0] if error.args else type(error).__name__)
