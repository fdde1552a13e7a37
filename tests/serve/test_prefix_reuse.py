"""Prefix reuse over HTTP: what a request did not read again is told in its usage and counted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from stages.decoding import EagleModel
from stages.targets import Target
from tests.serve.conftest import WIDE_TREE
from tests.serve.running_server import RunningServer, running_server


@pytest.fixture(scope="module")
def warm_server(target: Target, head_folder: str) -> Iterator[RunningServer]:
    model = EagleModel.from_pretrained(target, head_folder, tree=WIDE_TREE, max_batch=2, prefix_reuse=True)
    with running_server(model) as running:
        yield running


def test_the_next_turn_of_a_chat_is_cached_and_answered_as_ever(
    warm_server: RunningServer, server: RunningServer
) -> None:
    turns = [{"role": "user", "content": "first things first"}]
    cached = []
    for _ in range(3):
        body = {"messages": turns, "max_tokens": 12, "seed": 1, "temperature": 0.8, "ignore_eos": True}
        answers = [
            running.client.post(f"{running.url}/v1/chat/completions", json=body).json()
            for running in (warm_server, server)
        ]
        first, other = (answer["choices"][0]["message"]["content"] for answer in answers)
        assert first == other
        usage = answers[0]["usage"]
        cached.append((usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]))
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        turns = [*turns, {"role": "assistant", "content": first}, {"role": "user", "content": "go on"}]
    assert cached[0][0] == 0
    for (_, before), (hit, prompt) in pairwise(cached):
        assert before - 1 <= hit < prompt
    metrics = warm_server.metrics()
    assert metrics["eagle_cached_prompt_tokens_total"] == sum(hit for hit, _ in cached)
    assert metrics["eagle_prompt_tokens_total"] == sum(prompt for _, prompt in cached)


def test_a_stream_tells_it_in_its_last_event(warm_server: RunningServer) -> None:
    ids = list(range(40, 80))
    for hit in (0, 39):
        reply = warm_server.complete(ids, max_tokens=2, stream=True, stream_options={"include_usage": True})
        assert f'"cached_tokens":{hit}' in reply.text.splitlines()[-4]
