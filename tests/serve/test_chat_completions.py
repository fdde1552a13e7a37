"""The chat API over HTTP, as the openai client and raw requests see it."""

from __future__ import annotations

import copy
import dataclasses
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from transformers import GenerationConfig

from stages.decoding import EagleModel, SamplingParams
from stages.serve.request import ChatRequest
from stages.serve.served_model import ServedModel
from stages.targets import Target
from tests.serve.running_server import NAME, RunningServer, running_server, soon

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Où est 日本?"}]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 60, "extra_body": {"ignore_eos": True}},
    {"temperature": 0.8, "seed": 3, "max_completion_tokens": 60},
    {"temperature": 1.2, "top_p": 0.9, "seed": -5, "max_tokens": 60, "extra_body": {"top_k": 40}},
]
LONG = {"max_tokens": 450, "ignore_eos": True}
MEDIUM = {"max_tokens": 400, "ignore_eos": True}


def expected(plain: EagleModel, content: str, **params: Any) -> str:
    """The target's own answer, decoded without a head or a server."""
    return plain.generate([{"role": "user", "content": content}], SamplingParams(**params)).text


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_streamed_answer_is_the_answer(server: RunningServer, settings: dict[str, Any]) -> None:
    client = server.openai()
    whole = client.chat.completions.create(model=NAME, messages=MESSAGES, **settings)
    chunks = list(
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **settings
        )
    )
    *pieces, last, usage = chunks
    assert len(pieces) > 1
    assert (
        "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    )
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant"] + [None] * (len(pieces) - 1)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert usage.choices == []
    assert usage.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_answer_is_the_targets_own_and_its_tokens_are_counted(
    server: RunningServer, plain: EagleModel
) -> None:
    accepted = 0
    for seed in range(3):
        params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=seed)
        own = plain.generate([{"role": "user", "content": "hello"}], params)
        body = server.chat(max_tokens=30, temperature=1.0, seed=seed).json()
        assert body["choices"][0]["message"] == {"role": "assistant", "content": own.text, "refusal": None}
        assert body["choices"][0]["finish_reason"] == own.finish_reason
        speculation = body["usage"].pop("speculation")
        assert body["usage"].pop("prompt_tokens_details")["cached_tokens"] < len(own.prompt_ids)
        assert body["usage"] == {
            "prompt_tokens": len(own.prompt_ids),
            "completion_tokens": len(own.token_ids),
            "total_tokens": len(own.prompt_ids) + len(own.token_ids),
        }
        assert body["seed"] == seed
        assert speculation["drafted"] > speculation["steps"]
        assert speculation["accepted"] == sum(speculation["accepted_per_position"])
        accepted += speculation["accepted"]
    assert accepted > 0


def test_without_a_seed_answers_differ_and_the_seed_told_repeats_one(server: RunningServer) -> None:
    first, second = server.chat(max_tokens=16).json(), server.chat(max_tokens=16).json()
    assert first["choices"] != second["choices"]
    again = server.chat(max_tokens=16, seed=first["seed"]).json()
    assert again["choices"] == first["choices"]


def test_text_parts_are_joined_by_line_breaks(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    fields = {"temperature": 0, "max_tokens": 8}
    assert (
        server.chat(parts, **fields).json()["choices"] == server.chat("one\ntwo", **fields).json()["choices"]
    )


def test_without_a_limit_the_answer_may_fill_the_context(server: RunningServer) -> None:
    body = server.chat("x" * 470, temperature=0, ignore_eos=True).json()
    assert body["usage"]["total_tokens"] == 512
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_ends_the_answer_and_is_never_shown(server: RunningServer, length: int) -> None:
    fields = {"temperature": 0.9, "seed": 11, "max_tokens": 60}
    text = server.chat(**fields).json()["choices"][0]["message"]["content"]
    stop = text[20 : 20 + length]
    body = server.chat(**fields, stop=[stop, "never there"]).json()
    streamed = server.openai().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "hello"}], stop=stop, stream=True, **fields
    )
    chunks = list(streamed)
    assert body["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[: text.index(stop)]
    assert body["choices"][0]["finish_reason"] == chunks[-1].choices[0].finish_reason == "stop"
    assert body["usage"]["completion_tokens"] < 60


def test_a_client_that_leaves_a_stream_frees_the_engine_or_its_place_in_the_queue(
    server: RunningServer,
) -> None:
    url, body = f"{server.url}/v1/chat/completions", {"messages": MESSAGES, "stream": True, **LONG}
    with httpx.stream("POST", url, json=body) as first:
        lines = first.iter_lines()  # closes the stream when it goes
        next(lines)
        with httpx.stream("POST", url, json=body):
            assert server.engine.running + server.engine.waiting == 2
        assert soon(lambda: (server.engine.running, server.engine.waiting) == (1, 0))
        assert soon(lambda: "cancelled: 45+" in server.log[-1])
    assert soon(lambda: server.engine.running == 0)
    assert soon(lambda: "cancelled" in server.log[-1])


def test_clients_that_leave_before_the_answer_free_the_engine_and_the_queue(server: RunningServer) -> None:
    before = len(server.log)

    def impatient(_: int) -> None:
        body = {"messages": MESSAGES, **LONG}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=0.1)

    with ThreadPoolExecutor(3) as clients:
        list(clients.map(impatient, range(3)))
    assert soon(lambda: sum("cancelled" in line for line in server.log[before:]) == 3)
    assert soon(lambda: server.engine.running + server.engine.waiting == 0, 1.0)


def test_a_full_queue_is_answered_429_with_a_time_to_come_back(plain: EagleModel) -> None:
    with running_server(plain, max_queue=1) as server, ThreadPoolExecutor(2) as clients:
        jobs = [clients.submit(server.chat, **MEDIUM)]
        assert soon(lambda: server.engine.running == 1)
        jobs.append(clients.submit(server.chat, **MEDIUM))
        assert soon(lambda: server.engine.waiting == 1)
        refused = server.chat(**MEDIUM)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert [job.result().status_code for job in jobs] == [200, 200]


def test_a_server_that_stops_finishes_what_runs_and_turns_away_what_waits(plain: EagleModel) -> None:
    with running_server(plain) as server, ThreadPoolExecutor(3) as clients:
        runs = clients.submit(server.chat, **MEDIUM)
        assert soon(lambda: server.engine.running == 1)
        waits = clients.submit(server.chat, **MEDIUM)
        streams = clients.submit(server.chat, **MEDIUM, stream=True)
        assert soon(lambda: server.engine.waiting == 2)
        server.server.stop()
        assert (waits.result().status_code, waits.result().json()["error"]["code"]) == (
            503,
            "server_stopping",
        )
        assert '"code": "server_stopping"' in streams.result().text
        assert runs.result().json()["usage"]["completion_tokens"] == MEDIUM["max_tokens"]


def test_a_client_that_does_not_finish_its_request_does_not_keep_the_server_from_stopping(
    plain: EagleModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.serve.server.FLUSH_S", 0.1)
    with running_server(plain) as server:
        address = server.url.removeprefix("http://").split(":")
        client = socket.create_connection((address[0], int(address[1])))
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        assert soon(lambda: len(server.server.server_state.connections) == 1)
    client.close()


def test_the_log_has_counts_and_none_of_the_text(server: RunningServer) -> None:
    body = server.chat("a secret word", temperature=0, max_tokens=5).json()
    usage = body["usage"]
    assert f"{usage['prompt_tokens']}+{usage['completion_tokens']} tokens" in server.log[-1]
    server.chat("a secret word", tools=["secret"])
    assert not any("secret" in line for line in server.log)


def test_models_and_health(server: RunningServer) -> None:
    client = server.openai()
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).model_dump()["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    assert soon(
        lambda: httpx.get(f"{server.url}/health").json() == {"status": "ok", "running": 0, "waiting": 0}
    )


def test_parameters_that_ask_for_nothing_special_are_taken(server: RunningServer) -> None:
    neutral = {
        "n": 1,
        "logprobs": False,
        "frequency_penalty": 0.0,
        "presence_penalty": None,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "user": "someone",
        "metadata": {"a": "b"},
    }
    assert server.chat(max_tokens=1, **neutral).status_code == 200
    echoed = [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}]
    body = {"messages": [*MESSAGES, *echoed, *MESSAGES], "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200


USER = {"role": "user", "content": "hi"}
REFUSED = [
    ({}, "messages", "missing_required_parameter"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{**USER, "name": "Bob"}]}, "messages[0].name", "unsupported_parameter"),
    ({"messages": [{**USER, "content": "\ud800"}]}, "messages[0].content", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    ({"messages": [USER], "temperature": "0.5"}, "temperature", "invalid_type"),
    ({"messages": [USER], "temperature": -0.1}, "temperature", "invalid_value"),
    ({"messages": [USER], "temperature": float("nan")}, "temperature", "invalid_value"),
    ({"messages": [USER], "top_p": 0}, "top_p", "invalid_value"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"messages": [USER], "max_tokens": True}, "max_tokens", "invalid_type"),
    ({"messages": [USER], "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value"),
    ({"messages": [USER], "max_tokens": 1000}, "messages", "context_length_exceeded"),
    ({"messages": [{**USER, "content": "word " * 600}]}, "messages", "context_length_exceeded"),
    ({"messages": [USER], "stop": ""}, "stop", "invalid_value"),
    ({"messages": [USER], "stop": ["a", 5]}, "stop[1]", "invalid_type"),
    ({"messages": [USER], "seed": 2**70}, "seed", "invalid_value"),
    ({"messages": [USER], "stream": "yes"}, "stream", "invalid_type"),
    ({"messages": [USER], "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"messages": [USER], "n": 0}, "n", "invalid_value"),
    ({"messages": [USER], "n": 100}, "n", "invalid_value"),
    ({"messages": [USER], "n": True}, "n", "invalid_type"),
    ({"messages": [USER], "tools": ["f"]}, "tools[0]", "invalid_type"),
    ({"messages": [USER], "top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"messages": [USER], "logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
    ({"messages": [USER], "logit_bias": {"5": 101}}, "logit_bias.5", "invalid_value"),
    ({"messages": [USER], "logit_bias": {"512": 1}}, "logit_bias", "invalid_value"),
    ({"messages": [USER], "presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    ({"messages": [USER], "repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"messages": [USER], "min_p": 1.5}, "min_p", "invalid_value"),
    ({"messages": [USER], "prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
    ({"messages": [USER], "stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value"),
    ({"messages": [USER], "response_format": {"type": "json"}}, "response_format.type", "invalid_value"),
    ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    ({"messages": [USER], "temprature": 1}, "temprature", "unknown_parameter"),
    ({"messages": [USER], "\ud800": 1}, None, "invalid_json"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "code"), REFUSED)
def test_bad_requests_are_refused_as_openai_refuses_them(
    server: RunningServer, body: dict[str, Any], param: str | None, code: str
) -> None:
    response = httpx.post(
        f"{server.url}/v1/chat/completions",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert error["message"]
    assert "\n" not in error["message"]
    assert server.log[-1] == f"{response.headers['x-request-id']} refused: 400 {code}"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b'{"messages": "\xff"}', b"[" * 50_000])
def test_what_is_not_a_json_object_is_refused(server: RunningServer, body: bytes) -> None:
    url = f"{server.url}/v1/chat/completions"
    response = httpx.post(url, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_another_models_name_and_an_unknown_path_are_not_found(server: RunningServer) -> None:
    response = server.chat(model="gpt-5")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert "'tiny'" in response.json()["error"]["message"]
    assert "/v1/chat/completions" in httpx.get(f"{server.url}/openapi.json").json()["paths"]
    response = httpx.get(f"{server.url}/v2")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "invalid_request_error")
    assert httpx.get(f"{server.url}/v1/chat/completions").status_code == 405


def test_an_error_of_the_engine_is_a_500_and_a_traceback_in_the_log(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.engine._engine, "_admit", None)
    response = server.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
    assert "engine_error" in response.text
    assert any(f"{response.headers['x-request-id']} error: Traceback" in line for line in server.log)
    monkeypatch.undo()
    assert server.chat(max_tokens=1).status_code == 200


def test_the_targets_generation_config_gives_the_defaults(target: Target) -> None:
    config = GenerationConfig(
        temperature=0.6, top_p=0.9, repetition_penalty=1.05, typical_p=0.9, eos_token_id=target.eos_ids
    )
    model = copy.copy(target.model)
    model.generation_config = config
    served = ServedModel.of(dataclasses.replace(target, model=model), "tiny")
    request = ChatRequest.model_validate({"messages": [USER]})
    params = served.sampling(request, prompt_tokens=500)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.9, 0, 1.05)
    assert params.max_new_tokens == 12
    params = served.sampling(request.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": -1}), 500)
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 1.0, 0)
    params = served.sampling(request.model_copy(update={"top_k": 2**63}), 500)
    assert params.top_k == served.target.vocab_size
    assert served.unsupported_defaults() == ["typical_p=0.9"]
    assert (ServedModel.of(target).temperature, ServedModel.of(target).top_p) == (1.0, 1.0)
