"""A server's reply to one HTTP request, line by line, each as soon as it is there; waiting has an end."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from stages.errors import EagleError

KEY_VARIABLE = "OPENAI_API_KEY"
CONNECT_SECONDS = 10.0
LONGEST_LINE = 1 << 22
"""Bytes; far more than any chunk of an answer."""
_HINTS = {
    401: f"; {KEY_VARIABLE} is where its key is read from",
    403: f"; {KEY_VARIABLE} is where its key is read from",
    404: "; the address goes as far as the /v1, and a model is named as in http://host/v1#MODEL",
    429: "; a lower --concurrency or --request-rate may be what it allows",
}


class RefusedError(EagleError):
    """The server answered with another status than 200."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Replies:
    """Requests to one server. The key, if it wants one, comes from OPENAI_API_KEY and is never written
    anywhere.

    Several threads may ask at once; `abandon` ends all that is under way, and all that would begin after it.
    """

    def __init__(self, name: str, url: str) -> None:
        """Args:
        name: of the endpoint, for messages.
        url: what paths are added to.
        """
        self._name, self._url = name, url
        self._open: set[socket.socket] = set()
        self._abandoned = False

    def lines(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, patience: float
    ) -> Iterator[bytes]:
        """Lines without their ends.

        Args:
            patience: seconds for the next line.

        Raises:
            RefusedError: another status than 200.
            EagleError: nobody answers there, or not in time, or the reply breaks off.
        """
        address = urlsplit(self._url)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        begun = False
        try:
            if self._abandoned:
                raise ConnectionAbortedError("abandoned")
            with closing(kind(address.hostname or "", address.port, timeout=CONNECT_SECONDS)) as connection:
                connection.connect()
                link = connection.sock
                self._open.add(link)
                try:
                    if self._abandoned:  # while it was being connected
                        raise ConnectionAbortedError("abandoned")
                    begun = True
                    link.settimeout(patience)
                    connection.request(method, address.path + path, data, headers)
                    reply = connection.getresponse()
                    if reply.status != 200:
                        raise self._refusal(reply, path)
                    yield from _lines(reply, patience)
                finally:
                    self._open.discard(link)
        except TimeoutError:
            waited = f"nothing more came for {patience:g} s" if begun else "it takes no connection"
            raise EagleError(f"endpoint {self._name} hangs at {self._url}{path}: {waited}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise EagleError(
                f"endpoint {self._name} cannot be used at {self._url}: {reason}: see that the server runs"
            ) from error

    def abandon(self) -> None:
        """Breaks the connections, so that no thread waits on; nothing is asked any more."""
        self._abandoned = True
        for link in list(self._open):
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _refusal(self, reply: http.client.HTTPResponse, path: str) -> RefusedError:
        said = ""
        with suppress(OSError, http.client.HTTPException):  # the status says enough
            said = " ".join(reply.read(2000).decode(errors="replace").split())[:300]
        hint = _HINTS.get(reply.status, "")
        return RefusedError(
            f"endpoint {self._name} answered {reply.status} at {self._url}{path}: {said}{hint}", reply.status
        )


def _lines(reply: http.client.HTTPResponse, patience: float) -> Iterator[bytes]:
    """Raises TimeoutError where bytes drip in without a line, ValueError where one never ends."""
    begin, rest = time.monotonic(), b""
    while piece := reply.read1(1 << 16):
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
        now = time.monotonic()
        if whole:
            begin = now
        if now - begin > patience:
            raise TimeoutError
        if len(rest) > LONGEST_LINE:
            raise ValueError(f"it sent a line of over {LONGEST_LINE} bytes")
    if rest:
        yield rest
