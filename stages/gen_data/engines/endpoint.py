"""JSON over HTTP to one address, from many threads, through whatever a busy fleet does."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError, MaxRetryError

from stages.errors import EagleError

KEY_VARIABLE = "OPENAI_API_KEY"
CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0
"""For one answer; a server that says nothing for longer is asked again."""
TRIES = 9
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60
"""Between tries: none, then 2, 4, 8 ... 60 s and up to 2 s by chance, some five minutes in all."""
_BUSY = (408, 409, 425, 429, 500, 502, 503, 504)


class RefusedError(Exception):
    """The server understood a request and will not answer it.

    Attributes:
        status: of HTTP, 4xx.
        reason: the server's words, in one line.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason


class Endpoint:
    """An OpenAI-compatible API. The key comes from OPENAI_API_KEY and is never written anywhere."""

    def __init__(self, base_url: str, connections: int) -> None:
        """
        Args:
            base_url: with or without the `/v1` behind the host.
            connections: how many are kept open.
        """
        self.url = base_url.rstrip("/")
        if self.url.count("/") <= 2:  # only scheme and host
            self.url += "/v1"
        key = os.environ.get(KEY_VARIABLE)
        self._retries = urllib3.Retry(
            total=TRIES,
            allowed_methods=None,  # an answer that was lost may be made again
            status_forcelist=_BUSY,
            backoff_factor=PAUSE_SECONDS,
            backoff_max=LONGEST_PAUSE_SECONDS,
            backoff_jitter=2 * PAUSE_SECONDS,
            raise_on_status=False,
            retry_after_max=5 * LONGEST_PAUSE_SECONDS,
        )
        self._pool = urllib3.PoolManager(
            maxsize=connections,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
            retries=self._retries,
        )
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns of every new try

    def get(self, path: str) -> Any:
        """The JSON at `path`, at once if there is nobody. Raises like `post`."""
        return self._request("GET", path, None, retries=self._retries.new(connect=0))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that answers `body`; goes on asking while the server is busy or away.

        Raises:
            RefusedError: the server refuses this request (4xx).
            EagleError: it cannot be reached, refuses the key, fails again and again, or does not speak JSON.
        """
        return self._request("POST", path, body)

    def close(self) -> None:
        self._pool.clear()

    def _request(self, method: str, path: str, body: dict[str, Any] | None, **options: Any) -> Any:
        try:
            response = self._pool.request(method, f"{self.url}{path}", json=body, **options)
        except LocationParseError as error:
            raise EagleError(f"--base-url {self.url} is no address, such as http://host:8000/v1") from error
        except HTTPError as error:
            reason = error.reason if isinstance(error, MaxRetryError) and error.reason else error
            raise EagleError(
                f"the server at {self.url} cannot be reached ({_one_line(str(reason))}): start it, or "
                "correct --base-url; the same command again continues behind the last shard"
            ) from error
        text = response.data.decode("utf-8", "replace")
        if response.status in (401, 403):
            raise EagleError(
                f"the server at {self.url} refuses the key ({response.status}): set {KEY_VARIABLE} to one "
                "that it takes"
            )
        if response.status >= 500 or response.status in _BUSY:
            raise EagleError(
                f"the server at {self.url} fails again and again ({response.status}: {_reason(text)}); its "
                "log says why. The same command again continues behind the last shard"
            )
        if response.status >= 300:
            raise RefusedError(response.status, _reason(text))
        try:
            return json.loads(text)
        except ValueError as error:
            raise EagleError(
                f"the server at {self.url}{path} does not answer in JSON but with {_one_line(text)[:60]!r}: "
                "correct --base-url"
            ) from error


def _reason(text: str) -> str:
    """What an error's body says, in one line; OpenAI's servers put it in `error.message`."""
    try:
        found = json.loads(text)
        found = found.get("error", found) if isinstance(found, dict) else found
        found = found.get("message", found) if isinstance(found, dict) else found
        text = found if isinstance(found, str) else json.dumps(found)
    except ValueError:
        pass
    return _one_line(text) or "no reason given"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
