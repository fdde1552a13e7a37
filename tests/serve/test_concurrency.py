"""Requests that come together have the answers that each has alone, in float32 to the letter."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stages.decoding import DrafterChoice, EagleModel, SamplingParams, TreeConfig
from stages.targets import load_target
from tests.serve.running_server import RunningServer, running_server

REQUESTS = 64


def question(i: int) -> tuple[list[dict[str, str]], dict[str, Any]]:
    """A chat of one turn or two, and how it is to be answered."""
    messages = [{"role": "user", "content": f"Question {i % 7}: why is the sky blue?"}]
    if i % 3 == 0:
        messages += [{"role": "assistant", "content": "Rayleigh."}, {"role": "user", "content": f"And {i}?"}]
    params = {"temperature": (0.0, 0.7, 1.1)[i % 3], "seed": i, "top_p": (1.0, 0.9)[i % 2]}
    return messages, params


def ask(server: RunningServer, i: int, max_tokens: int) -> tuple[str, int]:
    """The text of an answer, streamed or not, and the drafted tokens accepted in it."""
    messages, params = question(i)
    body = {"messages": messages, "max_tokens": max_tokens, **params}
    if i % 2:
        answer = server.client.post(f"{server.url}/v1/chat/completions", json=body).json()
        return answer["choices"][0]["message"]["content"], answer["usage"]["speculation"]["accepted"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = server.client.post(f"{server.url}/v1/chat/completions", json=body).text.split("\n\n")
    *events, usage = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    return text, usage["usage"]["speculation"]["accepted"]


def compare(server: RunningServer, plain: EagleModel, max_tokens: int) -> None:
    server.client.timeout = 1200
    with ThreadPoolExecutor(REQUESTS) as clients:
        together = list(clients.map(lambda i: ask(server, i, max_tokens), range(REQUESTS)))
    for i, (text, _) in enumerate(together):
        messages, params = question(i)
        assert text == plain.generate(messages, SamplingParams(max_new_tokens=max_tokens, **params)).text, i
    assert len({text for text, _ in together}) > REQUESTS / 2
    assert sum(accepted for _, accepted in together) > 0


def test_64_answers_of_a_tiny_target(server: RunningServer, plain: EagleModel) -> None:
    compare(server, plain, 12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_64_answers_of_smollm2() -> None:
    target = load_target("builtin:smollm2", device="cpu", dtype="float32")
    drafter = DrafterChoice.parse("ngram:min=1,max=4")
    model = EagleModel(target, tree=TreeConfig.parse("chain:depth=3"), drafter=drafter, max_batch=8)
    with running_server(model) as server:
        compare(server, EagleModel(target), 24)
