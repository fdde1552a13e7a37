"""The name of a request, in the headers of every answer and in the log."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from stages.decoding import EagleModel
from stages.serve.app import Access
from tests.serve.running_server import RunningServer, running_server, soon

KEY = "sk-tested"
SANE = ["a", "req_1-2.3:4/5", "x" * 128]
NOT_SANE = ["", "x" * 129, "two words", "caf\u00e9", "a\tb"]


def _logged(server: RunningServer) -> str | None:
    """The last request's name in the log, which has it a moment after the client has its answer."""
    return json.loads(server.log[-1])["request_id"] if server.log else None


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_named_by_its_client_or_by_the_server(plain: EagleModel, stream: bool) -> None:
    with running_server(plain, log_format="json") as server:
        url = f"{server.url}/v1/completions"
        body = {"prompt": "a", "max_tokens": 1, "stream": stream}
        for given in SANE:
            response = httpx.post(url, json=body, headers={"X-Request-Id": given})
            assert response.headers.get_list("x-request-id") == [given]
            assert soon(lambda given=given: _logged(server) == given)
        for given in NOT_SANE:
            response = httpx.post(url, json=body, headers={"X-Request-Id": given.encode("latin-1")})
            (made,) = response.headers.get_list("x-request-id")
            assert re.fullmatch("[0-9a-f]{16}", made)
            assert soon(lambda made=made: _logged(server) == made)
        raw = server.openai().completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=1)
        assert soon(lambda: raw.request_id == _logged(server))


def test_errors_are_named_too(plain: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    access = Access(api_keys=(KEY,), max_body=1000, rate_limit=4)
    with running_server(plain, access=access) as server:
        url, named = f"{server.url}/v1/completions", {"X-Request-Id": "mine"}
        right = {**named, "Authorization": f"Bearer {KEY}"}
        for status, response in (
            (401, httpx.post(url, headers=named)),
            (404, httpx.get(f"{server.url}/nothing", headers=named)),
            (200, httpx.get(server.url, headers=named)),
            (400, httpx.post(url, json={}, headers=right)),
            (413, httpx.post(url, json={"prompt": "a" * 1000}, headers=right)),
            (400, httpx.post(url, content=b"\xff", headers={**right, "Content-Type": "application/json"})),
        ):
            assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")
        monkeypatch.setattr("stages.serve.app.questions_of", None)
        assert httpx.post(url, json={"prompt": "a"}, headers=right).headers["x-request-id"] == "mine"
        limited = httpx.post(url, json={"prompt": "a"}, headers=right)
        assert (limited.status_code, limited.headers["x-request-id"]) == (429, "mine")
        refused = [line for line in server.log if "refused" in line]
        assert len(refused) == 7
        assert all(line.startswith("mine refused: ") for line in refused)


def test_two_requests_have_two_names(server: RunningServer) -> None:
    names = {httpx.get(f"{server.url}/health").headers["x-request-id"] for _ in range(3)}
    assert len(names) == 3
