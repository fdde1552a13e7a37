"""The openai client against a running server: what is not the subject of another test here."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from stages.decoding import EagleModel, SamplingParams
from tests.serve.running_server import NAME, RunningServer, running_server, soon

MESSAGES: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "the heat"}]
LONG: dict[str, Any] = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}


def test_the_client_that_waits_for_nothing_gets_many_answers_at_once(
    server: RunningServer, plain: EagleModel
) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=NAME, messages=MESSAGES, temperature=1.0, seed=seed, max_tokens=12, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(8)))

    system = [{**message, "role": message["role"].replace("developer", "system")} for message in MESSAGES]
    alone = [
        plain.generate(system, SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed)).text
        for seed in range(8)
    ]
    assert asyncio.run(ask_all()) == alone


def test_options_of_the_client_are_those_of_the_target(server: RunningServer, plain: EagleModel) -> None:
    ids = plain.encode([{"role": "user", "content": "the heat"}])
    token = plain.generate(ids, SamplingParams(max_new_tokens=3)).token_ids[1]
    answer = server.openai().chat.completions.create(
        model=NAME,
        messages=MESSAGES[1:],
        max_completion_tokens=30,
        temperature=0.9,
        top_p=0.8,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={str(token): -100},
        seed=5,
        n=2,
        user="someone",
        metadata={"a": "b"},
        extra_body={"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.1, "ignore_eos": True},
    )
    own = [
        plain.generate(
            ids,
            SamplingParams(
                max_new_tokens=30,
                temperature=0.9,
                top_p=0.8,
                presence_penalty=0.5,
                frequency_penalty=0.3,
                logit_bias={token: -100.0},
                seed=5,
                sample=sample,
                top_k=30,
                min_p=0.01,
                repetition_penalty=1.1,
                ignore_eos=True,
            ),
        ).text
        for sample in range(2)
    ]
    assert [choice.message.content for choice in answer.choices] == own


def test_a_stream_that_is_closed_ends_the_request(server: RunningServer) -> None:
    with server.openai().chat.completions.create(
        model=NAME, messages=MESSAGES, stream=True, **LONG
    ) as stream:
        next(iter(stream))
        assert server.engine.running == 1
    assert soon(lambda: server.engine.running == 0)


def test_the_stream_helper_tells_of_text_as_it_comes_and_gives_the_whole(server: RunningServer) -> None:
    with server.openai().chat.completions.stream(
        model=NAME,
        messages=MESSAGES,
        seed=2,
        max_tokens=20,
        stream_options={"include_usage": True},
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        whole = stream.current_completion_snapshot
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 20


def test_text_completions_are_streamed_with_their_usage(server: RunningServer, plain: EagleModel) -> None:
    *chunks, last = server.openai().completions.create(
        model=NAME,
        prompt="the heat",
        max_tokens=20,
        temperature=0,
        stop=["never there"],
        stream=True,
        stream_options={"include_usage": True},
    )
    own = plain.generate(plain.target.tokenizer("the heat")["input_ids"], SamplingParams(max_new_tokens=20))
    assert "".join(chunk.choices[0].text for chunk in chunks) == own.text
    assert chunks[-1].choices[0].finish_reason == own.finish_reason
    assert last.usage is not None
    assert last.usage.completion_tokens == len(own.token_ids)


def test_raw_responses_have_json_and_a_status(server: RunningServer) -> None:
    raw = server.openai().chat.completions.with_raw_response.create(
        model=NAME, messages=MESSAGES, max_tokens=1
    )
    assert (raw.status_code, raw.headers["content-type"]) == (200, "application/json")
    assert raw.parse().object == "chat.completion"


def test_errors_are_the_clients_own_classes(plain: EagleModel) -> None:
    with running_server(plain, max_queue=1) as server, ThreadPoolExecutor(2) as clients:
        client = server.openai()
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=9)
        assert (refused.value.param, refused.value.code) == ("temperature", "invalid_value")
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="other", messages=MESSAGES)
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model=NAME, input="x")
        jobs = []
        for count in (1, 2):
            jobs.append(clients.submit(client.chat.completions.create, model=NAME, messages=MESSAGES, **LONG))
            assert soon(lambda count=count: server.engine.running + server.engine.waiting == count)  # type: ignore[misc]
        with pytest.raises(openai.RateLimitError) as full:
            client.chat.completions.create(model=NAME, messages=MESSAGES)
        assert full.value.code == "queue_full"
        server.server.stop()
        turned_away = jobs[1].exception(60)
        assert isinstance(turned_away, openai.InternalServerError)
        assert turned_away.code == "server_stopping"


def test_the_client_comes_back_when_it_is_told_to(plain: EagleModel) -> None:
    """It reads Retry-After by itself."""
    with running_server(plain, max_queue=1) as server, ThreadPoolExecutor(3) as clients:
        patient = server.openai().with_options(max_retries=8)
        jobs = [
            clients.submit(
                patient.completions.create,
                model=NAME,
                prompt="a",
                max_tokens=150,
                extra_body={"ignore_eos": True},
            )
            for _ in range(3)
        ]
        usages = [job.result(120).usage for job in jobs]
    assert [usage.completion_tokens for usage in usages if usage] == [150] * 3
