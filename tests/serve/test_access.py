"""Who may ask, how much, and from which pages."""

from __future__ import annotations

import httpx
import openai
import pytest

from stages.decoding import EagleModel
from stages.errors import EagleError
from stages.serve.app import Access
from stages.serve.served_model import ServedModel
from stages.targets import Target
from tests.serve.running_server import NAME, running_server

KEY = "sk-tested"
PAGE = "https://chat.example.com"


def test_only_who_has_the_key_may_ask(plain: EagleModel) -> None:
    with running_server(plain, access=Access(api_key=KEY)) as server:
        assert [model.id for model in server.openai(KEY).models.list()] == [NAME]
        answer = server.openai(KEY).completions.create(model=NAME, prompt="a", max_tokens=1)
        assert answer.usage is not None
        for wrong in ("none", KEY[:-1], KEY + "x"):
            with pytest.raises(openai.AuthenticationError) as caught:
                server.openai(wrong).completions.create(model=NAME, prompt="a", max_tokens=1)
            assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")
        for header in ({}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}):
            response = httpx.get(f"{server.url}/v1/models", headers=header)
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        given = {"Authorization": b"Bearer \xff\xfe"}
        assert httpx.get(f"{server.url}/v1/models", headers=given).status_code == 401
        for path in ("/health", "/version", "/metrics"):
            assert httpx.get(server.url + path).status_code == 200
        assert "refused: 401 invalid_api_key" in server.log
        assert KEY not in "".join(server.log)


def test_a_body_beyond_the_limit_is_refused_whether_it_says_its_size_or_not(plain: EagleModel) -> None:
    with running_server(plain, access=Access(max_body=2000)) as server:
        assert server.complete("a" * 1800, max_tokens=1).json()["error"]["code"] == "context_length_exceeded"
        told = server.complete("a" * 2000, max_tokens=1)
        untold = httpx.post(
            f"{server.url}/v1/completions",
            content=iter([b'{"prompt": "', *[b"a" * 500] * 4, b'"}']),
            headers={"Content-Type": "application/json"},
        )
        for response in (told, untold):
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"
            assert "2000 bytes" in response.json()["error"]["message"]
        assert server.complete("a", max_tokens=1).status_code == 200


def test_other_pages_may_not_read_answers_unless_named(plain: EagleModel) -> None:
    asks = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with running_server(plain) as server:
        assert httpx.options(f"{server.url}/v1/completions", headers=asks).status_code == 405
        response = httpx.get(f"{server.url}/health", headers={"Origin": PAGE})
        assert "access-control-allow-origin" not in response.headers
    with running_server(plain, access=Access(api_key=KEY, cors_origins=(PAGE,))) as server:
        response = httpx.options(f"{server.url}/v1/completions", headers=asks)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == PAGE
        response = httpx.get(f"{server.url}/v1/models", headers={"Origin": PAGE})
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, PAGE)
        other = httpx.get(f"{server.url}/health", headers={"Origin": "https://other.example.com"})
        assert "access-control-allow-origin" not in other.headers


def test_the_context_can_be_made_shorter_and_no_longer(plain: EagleModel, target: Target) -> None:
    with running_server(plain, max_length=40) as server:
        assert server.openai().models.retrieve(NAME).model_dump()["max_model_len"] == 40
        body = server.complete([1] * 30, ignore_eos=True).json()
        assert body["usage"]["total_tokens"] == 40
        assert server.complete([1] * 30, max_tokens=11).status_code == 400
    with pytest.raises(EagleError, match=r"--max-model-len is 513 and .* has 512 tokens"):
        ServedModel.of(target, max_length=513)
