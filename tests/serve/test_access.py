"""Who may ask, how much, and from which pages."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from stages.decoding import EagleModel
from stages.errors import EagleError
from stages.serve.access import client_of
from stages.serve.app import Access
from stages.serve.config import ServeConfig
from stages.serve.rate_limit import RequestRate
from stages.serve.served_model import ServedModel
from stages.serve.stage import api_keys
from stages.targets import Target
from tests.serve.running_server import NAME, running_server

KEY = "sk-tested"
PAGE = "https://chat.example.com"


def test_only_who_has_the_key_may_ask(plain: EagleModel) -> None:
    with running_server(plain, access=Access(api_keys=(KEY,))) as server:
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
        assert any(line.endswith(" refused: 401 invalid_api_key") for line in server.log)
        assert KEY not in "".join(server.log)


def test_one_of_several_keys_is_enough(plain: EagleModel) -> None:
    with running_server(plain, access=Access(api_keys=("sk-one", "sk-two"))) as server:
        for key in ("sk-one", "sk-two"):
            assert server.openai(key).completions.create(model=NAME, prompt="a", max_tokens=1).usage
        with pytest.raises(openai.AuthenticationError):
            server.openai("sk-three").models.list()


def test_keys_come_from_the_flags_else_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_API_KEY", "a, b,,a")
    assert api_keys(ServeConfig(target="t")) == ("a", "b")
    assert api_keys(ServeConfig(target="t", api_key=("c",))) == ("c",)
    with pytest.raises(ValidationError, match="a key is empty"):
        ServeConfig(target="t", api_key=("c", " "))
    monkeypatch.delenv("EAGLE_API_KEY")
    assert api_keys(ServeConfig(target="t")) == ()


def test_one_client_may_send_so_many_requests_and_others_do_not_suffer(plain: EagleModel) -> None:
    access = Access(api_keys=("sk-one", "sk-two"), rate_limit=3)
    with running_server(plain, access=access) as server:
        one, two = server.openai("sk-one"), server.openai("sk-two")
        for _ in range(3):
            one.completions.create(model=NAME, prompt="a", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            one.completions.create(model=NAME, prompt="a", max_tokens=1)
        assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        two.completions.create(model=NAME, prompt="a", max_tokens=1)
        assert one.models.list()
        assert server.metrics()['eagle_requests_total{outcome="refused"}'] == 1
        for _ in range(4):  # a wrong key is nobody, and takes from nobody
            with pytest.raises(openai.AuthenticationError):
                server.openai("sk-no").completions.create(model=NAME, prompt="a")


def test_nobody_passes_for_another_unless_a_proxy_says_so(plain: EagleModel) -> None:
    access = Access(rate_limit=2)
    for proxies, taken in (((), 2), (("10.0.0.0/8",), 2), (("127.0.0.0/8",), 5)):
        with running_server(plain, access=access, proxies=proxies) as server:
            statuses = [
                httpx.post(
                    f"{server.url}/v1/completions",
                    json={"prompt": "a", "max_tokens": 1},
                    headers={"X-Forwarded-For": f"10.9.9.9, 192.0.2.{i}", "Forwarded": f"for=192.0.2.{i}"},
                ).status_code
                for i in range(5)
            ]
        assert statuses == [200] * taken + [429] * (5 - taken)


def test_proxies_are_addresses_and_networks() -> None:
    given = ("10.0.0.7", "10.1.2.3/8", " ::1 ")
    assert ServeConfig(target="t", forwarded_allow_ips=given).forwarded_allow_ips == (
        "10.0.0.7/32",
        "10.0.0.0/8",
        "::1/128",
    )
    for wrong in ("*", "proxy", ""):
        with pytest.raises(ValidationError, match="is no address or network"):
            ServeConfig(target="t", forwarded_allow_ips=(wrong,))


def test_in_no_minute_are_there_more_requests_than_the_limit() -> None:
    now = [0.0]
    rate = RequestRate(2, clock=lambda: now[0])
    taken: list[float] = []
    for step in range(2000):
        now[0] += (step * 7919 % 13) * 2.5
        wait = rate.take("a")
        if wait == 0.0:
            taken.append(now[0])
        else:
            assert wait == pytest.approx(taken[-2] + 60.0 - now[0])
        assert rate.take(f"other {step}") == 0.0
    assert all(after - before >= 60.0 for before, after in zip(taken, taken[2:], strict=False))
    assert len(taken) > 500
    assert len(rate._taken) < 1100, "clients of long ago are forgotten"


@pytest.mark.parametrize(
    ("scope", "client"),
    [
        ({"client": ("10.0.0.1", 5)}, "10.0.0.1"),
        ({"client": ("2001:db8::1:2", 5)}, "2001:db8::/64"),
        ({"client": ("::ffff:10.0.0.1", 5)}, "10.0.0.1"),
        ({"client": ("10.0.0.1", 5), "eagle.key": 1}, "key 1"),
        ({"client": None}, ""),
    ],
)
def test_a_client_is_who_has_a_key_else_an_address(scope: dict[str, Any], client: str) -> None:
    assert client_of(scope) == client


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
    with running_server(plain, access=Access(api_keys=(KEY,), cors_origins=(PAGE,))) as server:
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
