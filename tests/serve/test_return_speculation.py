"""What a stream tells about drafting, and answers without it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.decoding import EagleModel, SamplingParams
from tests.serve.running_server import RunningServer


def events(server: RunningServer, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one streamed answer with `return_speculation`."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_speculation": True}
    with server.client.stream("POST", f"{server.url}/v1/{path}", json=body) as response:
        for line in response.iter_lines():
            if line and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def chat(server: RunningServer, **fields: Any) -> Iterator[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 1.0, "seed": 3, **fields}
    return events(server, "chat/completions", body)


def test_events_tell_how_many_of_their_tokens_were_drafted(server: RunningServer) -> None:
    *chunks, usage = chat(server, max_tokens=60, ignore_eos=True)
    steps = [c["choices"][0]["speculation"] for c in chunks if "speculation" in c["choices"][0]]
    first, *others = steps
    assert (first["accepted"], len(first["texts"])) == (0, 1)  # the prompt's own
    assert sum(len(step["texts"]) for step in steps) == 60 == usage["usage"]["completion_tokens"]
    assert all(0 <= step["accepted"] < len(step["texts"]) for step in others[:-1])
    times = [step["seconds"] for step in steps]
    assert times[0] > 0
    assert times == sorted(times)
    counts = usage["usage"]["speculation"]
    assert len(others) == counts["steps"]
    assert sum(step["accepted"] for step in others) == counts["accepted"] > 0
    for chunk in chunks:
        choice = chunk["choices"][0]
        assert "".join(choice.get("speculation", {"texts": []})["texts"]) == choice["delta"].get(
            "content", ""
        )


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 24), length=st.integers(1, 4), n=st.integers(1, 2))
def test_the_texts_joined_are_the_answer_with_stop_strings_and_without(
    server: RunningServer, seed: int, cut: int, length: int, n: int
) -> None:
    fields: dict[str, Any] = {"seed": seed, "max_tokens": 16, "n": n}
    text = server.chat(**fields, temperature=1.0).json()["choices"][0]["message"]["content"]
    stop = text[cut : cut + length] or "never there"
    whole = server.chat(**fields, temperature=1.0, stop=stop).json()
    texts = [""] * n
    for event in chat(server, **fields, stop=stop):
        for choice in event["choices"]:
            texts[choice["index"]] += "".join(choice.get("speculation", {"texts": []})["texts"])
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]


def test_text_completions_tell_the_same(server: RunningServer) -> None:
    body = {"prompt": "hello", "temperature": 1.0, "seed": 3, "max_tokens": 20}
    *chunks, usage = events(server, "completions", body)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [p["text"] for p in parts] == [
        "".join(p.get("speculation", {"texts": []})["texts"]) for p in parts
    ]
    told = sum(p.get("speculation", {"accepted": 0})["accepted"] for p in parts)
    assert told == usage["usage"]["speculation"]["accepted"]


def test_without_speculation_nothing_is_drafted_and_the_text_is_the_same(
    server: RunningServer, plain: EagleModel
) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=5)
    own = plain.generate([{"role": "user", "content": "hello"}], params).text
    for speculative in (False, True, None):
        body = server.chat(max_tokens=40, temperature=1.0, seed=5, speculative=speculative).json()
        assert body["choices"][0]["message"]["content"] == own
        assert (body["usage"]["speculation"]["drafted"] > 0) == (speculative is not False)
    steps = [
        c["choices"][0]["speculation"] for c in list(chat(server, max_tokens=20, speculative=False))[:-2]
    ]
    assert {(step["accepted"], len(step["texts"])) for step in steps} == {(0, 1)}


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"return_speculation": True}, "return_speculation"), ({"speculative": "no"}, "speculative")],
)
def test_what_makes_no_sense_is_refused(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = server.chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
