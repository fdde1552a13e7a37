"""`/v1/completions`, and the options that both endpoints share, through the openai client."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import httpx
import openai
import pytest

from stages.decoding import EagleModel, GenerationResult, SamplingParams
from stages.gen_data.engines.engine import Question
from stages.gen_data.engines.openai_engine import OpenAiEngine
from stages.gen_data.engines.seed import outside_seed
from stages.targets import Target
from tests.serve.running_server import NAME, RunningServer, running_server, soon

PROMPTS = ["the heat of", "Où est 日本?", "a"]


def own(plain: EagleModel, prompt: str | list[int], **params: Any) -> tuple[str, list[int]]:
    """The target's own text and ids, decoded without a head or a server."""
    ids = plain.target.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    answer = plain.generate(ids, SamplingParams(**params))
    return answer.text, answer.token_ids


def test_a_prompt_as_text_and_as_ids_is_answered_as_the_target_goes_on(
    server: RunningServer, plain: EagleModel
) -> None:
    client, text = server.openai(), PROMPTS[1]
    ids = plain.target.tokenizer(text)["input_ids"]
    expected, _ = own(plain, text, max_new_tokens=20, temperature=0.7, seed=5)
    for prompt in (text, ids, [text], [ids]):
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=20, temperature=0.7, seed=5)
        assert [choice.text for choice in answer.choices] == [expected]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.object == "text_completion"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_with_several_answers_each_come_in_order(
    server: RunningServer, plain: EagleModel, stream: bool
) -> None:
    options: Any = {"prompt": PROMPTS, "n": 2, "max_tokens": 12, "temperature": 1.0, "seed": 8}
    answer = server.openai().completions.create(
        model=NAME,
        stream=stream,
        **options,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    texts, reasons, usage = [""] * 6, [None] * 6, None
    for part in answer if stream else [answer]:
        usage = part.usage or usage
        for choice in part.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    expected = [
        own(plain, prompt, max_new_tokens=12, temperature=1.0, seed=8, sample=sample)
        for prompt in PROMPTS
        for sample in range(2)
    ]
    assert texts == [text for text, _ in expected]
    assert len(set(texts)) == 6
    assert set(reasons) <= {"stop", "length"}
    assert usage.prompt_tokens == sum(len(plain.target.tokenizer(p)["input_ids"]) for p in PROMPTS)
    assert usage.completion_tokens == sum(len(ids) for _, ids in expected)


def test_a_chat_has_several_answers_which_differ(server: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    options: Any = {"model": NAME, "messages": messages, "n": 3, "max_tokens": 10, "seed": 1}
    client = server.openai()
    whole = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    streamed, roles = [""] * 3, [0] * 3
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
    assert streamed == texts
    assert roles == [1, 1, 1]


PARAMS: list[dict[str, Any]] = [
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "logit_bias": {"104": 6.5, "5": -100.0}},
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda params: list(params)[-1])
def test_what_is_asked_of_sampling_is_what_the_target_does(
    server: RunningServer, plain: EagleModel, params: dict[str, Any]
) -> None:
    asked = dict(params)
    if "logit_bias" in asked:
        asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
    expected = own(plain, "the heat", max_new_tokens=30, seed=2, ignore_eos=True, **asked)
    _, without = own(
        plain, "the heat", max_new_tokens=30, seed=2, ignore_eos=True, temperature=params["temperature"]
    )
    body = server.complete(
        "the heat", max_tokens=30, seed=2, ignore_eos=True, return_token_ids=True, **params
    ).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["token_ids"]) == expected
    assert choice["token_ids"] != without, "the option made no difference"


def test_a_stop_token_ends_the_answer_and_is_named(server: RunningServer, plain: EagleModel) -> None:
    text, ids = own(plain, "heat", max_new_tokens=20, ignore_eos=True)
    stop = next(token for token in ids[5:] if token not in plain.target.eos_ids)
    end = ids.index(stop)
    body = server.complete(
        "heat", temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop], return_token_ids=True
    ).json()
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == ids[: end + 1]
    assert choice["text"] == plain.target.decode(ids[:end])
    assert text.startswith(choice["text"])
    named = server.complete("heat", temperature=0, max_tokens=20, ignore_eos=True, stop=text[4:6]).json()
    assert named["choices"][0]["stop_reason"] == text[4:6]


@pytest.mark.parametrize("stream", [False, True])
def test_what_ends_an_answer_is_shown_if_that_is_wanted(server: RunningServer, stream: bool) -> None:
    fields: dict[str, Any] = {"temperature": 0.9, "seed": 11, "max_tokens": 40, "ignore_eos": True}
    text = server.complete("heat", **fields).json()["choices"][0]["text"]
    stop = text[20:23]
    shown = server.complete("heat", **fields, stop=stop, include_stop_str_in_output=True, stream=stream)
    assert shown.status_code == 200
    found = "".join(part["choices"][0]["text"] for part in events(shown)) if stream else None
    whole = text[: text.index(stop) + len(stop)]
    assert (found if stream else shown.json()["choices"][0]["text"]) == whole


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Those of a stream that was read to its end."""
    *lines, last = filter(None, response.text.split("\n\n"))
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("chat", [False, True])
def test_every_event_has_the_usage_so_far_if_that_is_wanted(server: RunningServer, chat: bool) -> None:
    ask = server.chat if chat else server.complete
    asked: dict[str, Any] = {"max_tokens": 20, "n": 2, "seed": 3, "temperature": 1.0, "ignore_eos": True}
    both = {"include_usage": True, "continuous_usage_stats": True}
    response = ask(**asked, stream=True, stream_options=both, return_token_ids=True)
    counted = 0
    *parts, last = events(response)
    for event in parts:
        counted += sum(len(choice["token_ids"]) for choice in event["choices"])
        usage = event["usage"]
        assert usage["completion_tokens"] == counted
        assert usage["total_tokens"] == counted + usage["prompt_tokens"]
    assert (last["choices"], last["usage"]) == ([], parts[-1]["usage"])
    assert counted == 40
    plainly = ask(**asked, stream=True, stream_options={"include_usage": True})
    assert ["usage" in event for event in events(plainly)].count(True) == 1
    refused = ask(stream=True, stream_options={"continuous_usage_stats": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("chat", [False, True])
def test_token_ids_of_prompt_and_answer_are_shown_as_vllm_shows_them(
    server: RunningServer, plain: EagleModel, chat: bool
) -> None:
    fields: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 25, "return_token_ids": True}
    ask = server.chat if chat else server.complete
    prompt = plain.encode("hello") if chat else plain.target.tokenizer("hello")["input_ids"]
    _, ids = own(plain, prompt, max_new_tokens=25, temperature=0.9, seed=4)
    whole = ask("hello", **fields).json()
    assert whole["choices"][0]["token_ids"] == ids
    assert (whole if chat else whole["choices"][0])["prompt_token_ids"] == prompt
    lines = ask("hello", **fields, stream=True).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
    assert [i for event in events for choice in event["choices"] for i in choice["token_ids"]] == ids
    shown = [event if chat else event["choices"][0] for event in events]
    assert [part.get("prompt_token_ids") for part in shown] == [prompt] + [None] * (len(events) - 1)
    plainly = ask("hello", **{**fields, "return_token_ids": None}).json()
    assert "token_ids" not in plainly["choices"][0]
    assert "prompt_token_ids" not in plainly
    assert plainly["choices"][0] == {k: v for k, v in whole["choices"][0].items() if "token_ids" not in k}


def test_usage_tells_how_the_answer_was_speculated(server: RunningServer) -> None:
    answer = server.openai().completions.create(
        model=NAME, prompt="the heat", max_tokens=60, temperature=1.0, seed=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    spec = answer.usage.model_dump()["speculation"]
    assert spec["steps"] + sum(spec["accepted_per_position"]) == 59  # the first comes with the prompt
    assert spec["accepted"] == sum(spec["accepted_per_position"]) > 0
    assert spec["drafted"] >= 60 * (spec["steps"] - 1)
    assert spec["tokens_per_step"] == round(59 / spec["steps"], 3)


REFUSED = [
    ({}, "prompt", "missing_required_parameter"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": 7}, "prompt", "invalid_type"),
    ({"prompt": ["a", 7]}, "prompt[1]", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
    ({"prompt": [1, -2]}, "prompt[1]", "invalid_value"),
    ({"prompt": [[1], []]}, "prompt[1]", "invalid_value"),
    ({"prompt": [512]}, "prompt", "invalid_value"),
    ({"prompt": [1] * 512}, "prompt", "context_length_exceeded"),
    ({"prompt": ["a"] * 65}, "n", "invalid_value"),
    ({"prompt": "a", "echo": True}, "echo", "unsupported_parameter"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter"),
    ({"prompt": "a", "best_of": 2}, "best_of", "unsupported_parameter"),
    ({"prompt": "a", "cache_salt": "s"}, "cache_salt", "unsupported_parameter"),
    ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"prompt": "a", "logit_bias": {"02": 1, "2": 2}}, "logit_bias.02", "invalid_value"),
    ({"prompt": "a", "messages": []}, "messages", "unknown_parameter"),
    ({"prompt": "a", "tools": []}, "tools", "unknown_parameter"),
]


@pytest.mark.parametrize(("body", "param", "code"), REFUSED)
def test_bad_requests_are_refused(server: RunningServer, body: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().post("/completions", body=body, cast_to=httpx.Response)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        param,
        code,
        "invalid_request_error",
    )


def test_neutral_options_of_vllms_benchmark_client_are_taken(server: RunningServer) -> None:
    body = {
        "model": NAME,
        "repetition_penalty": 1.0,
        "max_tokens": 3,
        "temperature": 0.0,
        "logprobs": None,
        "echo": False,
        "best_of": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "ignore_eos": True,
    }
    assert '"completion_tokens":3' in server.complete(**body).text


def test_the_answers_of_a_request_wait_together_or_not_at_all(plain: EagleModel) -> None:
    long: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    with running_server(plain, max_queue=3) as server, ThreadPoolExecutor(1) as clients:
        first = clients.submit(server.complete, **long, n=3)
        assert soon(lambda: server.engine.running == 1)
        assert server.complete(**long, n=2).status_code == 429  # two wait still
        assert server.complete(max_tokens=1).status_code == 200
        assert first.result().json()["usage"]["completion_tokens"] == 600
        error = server.complete(["x", "y"], n=128).json()["error"]
        assert error["param"] == "n"
        assert "asks for 256 answers" in error["message"]


def test_an_answer_of_many_prompts_is_freed_when_the_client_leaves(server: RunningServer) -> None:
    body = {"prompt": PROMPTS, "n": 3, "stream": True, "max_tokens": 450, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()  # closes the stream when it goes
        next(lines)
        assert server.engine.running + server.engine.waiting == 9
    assert soon(lambda: server.engine.running + server.engine.waiting == 0)
    assert soon(lambda: "cancelled: 9 answers" in server.log[-1])


def test_text_is_tokenised_as_the_tokenizer_does_by_itself(server: RunningServer, target: Target) -> None:
    body = server.complete("<|im_start|>x", max_tokens=1, return_token_ids=True).json()
    assert body["choices"][0]["prompt_token_ids"] == target.tokenizer("<|im_start|>x")["input_ids"]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 5}, slice(-5, None)),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, slice(5)),
        ({"truncate_prompt_tokens": 10_000}, slice(None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 12}, slice(-500, None)),
    ],
)
def test_a_long_prompt_is_cut_if_that_is_wanted(
    server: RunningServer, fields: dict[str, Any], kept: slice
) -> None:
    ids = [i % 200 for i in range(600 if fields["truncate_prompt_tokens"] == -1 else 20)]
    body = server.complete(ids, **{"max_tokens": 1, "return_token_ids": True, **fields}).json()
    assert body["choices"][0]["prompt_token_ids"] == ids[kept]
    chat: dict[str, Any] = {"content": "hello " * 100, "max_tokens": 1, "return_token_ids": True, "seed": 1}
    whole = server.chat(**chat).json()["prompt_token_ids"]
    assert server.chat(**{**chat, **fields}).json()["prompt_token_ids"] == whole[kept]


def test_special_tokens_are_part_of_the_text_if_that_is_wanted(server: RunningServer, target: Target) -> None:
    start, eos = target.tokenizer.convert_tokens_to_ids("<|im_start|>"), target.tokenizer.eos_token_id
    fields: dict[str, Any] = {"logit_bias": {str(start): 8, str(eos): 3}, "max_tokens": 80, "logprobs": 0}
    shown = {"skip_special_tokens": False, "return_token_ids": True}
    for seed in range(3):
        (choice,) = server.complete("x", seed=seed, **fields, **shown).json()["choices"]
        ids = choice["token_ids"]
        assert start in ids
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == target.tokenizer.decode(ids[:-1], skip_special_tokens=False)
        for token, offset in zip(ids[:-1], choice["logprobs"]["text_offset"][:-1], strict=True):
            if token == start:
                assert choice["text"][offset:].startswith("<|im_start|>")
        (ended,) = server.complete("x", seed=seed, include_stop_str_in_output=True, **fields, **shown).json()[
            "choices"
        ]
        assert ended["text"] == choice["text"] + "<|im_end|>"
        (hidden,) = server.complete("x", seed=seed, **fields).json()["choices"]
        assert hidden["text"] == target.tokenizer.decode(ids, skip_special_tokens=True)


def test_gen_data_gets_the_ids_that_were_sampled(server: RunningServer, plain: EagleModel) -> None:
    prompts = {str(i): plain.encode(f"question {i}") for i in range(6)}
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=1)
    with closing(OpenAiEngine(plain.target, server.url, 4, 256, served_model=NAME)) as engine:
        assert not engine.reads_messages
        questions = [Question(name, ids, params, []) for name, ids in prompts.items()]
        answers = list(engine.answers(questions))
    assert sorted(answer.id for answer in answers) == sorted(prompts)
    for answer in answers:
        assert isinstance(answer, GenerationResult)
        sampled = dataclasses.replace(params, seed=outside_seed(params))
        assert answer.token_ids == plain.generate(prompts[answer.id], sampled).token_ids
