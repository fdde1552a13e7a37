"""Tools over HTTP: calls that must be, calls that may be, what they gave, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from stages.decoding import DrafterChoice, EagleModel, SamplingParams, TreeConfig
from stages.serve.answer import Answer
from stages.serve.grammar import Grammars
from stages.serve.tool import Tool
from stages.serve.tool_calls import ToolCallReader
from stages.serve.tool_form import NAMED, TAGGED
from stages.targets import Target, load_target
from tests.serve import tool_templates
from tests.serve.running_server import NAME, RunningServer, running_server
from tests.tiny import make_tiny_target


class Weather(BaseModel):
    """Says what the weather will be."""

    model_config = ConfigDict(extra="forbid", strict=True)
    city: str = Field(max_length=4)
    unit: Literal["C", "F"]


FUNCTIONS = [
    openai.pydantic_function_tool(Weather, name="weather"),
    {"type": "function", "function": {"name": "stop"}},
]
TOOLS: Any = [json.loads(json.dumps(function)) for function in FUNCTIONS]
MESSAGES: Any = [{"role": "user", "content": "the heat"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
FORCED: list[dict[str, Any]] = [
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": WEATHER},
]


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target whose template shows tools and writes calls."""
    folder = tmp_path_factory.mktemp("tools") / "target"
    make_tiny_target(folder, chat_template=tool_templates.TAGGED, max_length=1024)
    return load_target(str(folder), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def server(knowing: Target) -> Iterator[RunningServer]:
    drafter = DrafterChoice.parse("ngram:min=1,max=4")
    model = EagleModel(knowing, tree=TreeConfig.parse("chain:depth=3"), drafter=drafter, max_batch=4)
    with running_server(model) as running:
        yield running


@pytest.fixture(scope="module")
def unknowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A target whose template knows no tools."""
    folder = make_tiny_target(tmp_path_factory.mktemp("no-tools") / "target", max_length=2048)
    target = load_target(str(folder), device="cpu", dtype="float32")
    with running_server(EagleModel(target, max_batch=4)) as running:
        yield running


def ask(server: RunningServer, **fields: Any) -> Any:
    options = {"model": NAME, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "seed": 3, **fields}
    return server.openai().chat.completions.create(**options)


def check(call: Any) -> None:
    """A call follows its schema."""
    if call.function.name == "weather":
        Weather.model_validate_json(call.function.arguments)
    else:
        assert (call.function.name, call.function.arguments) == ("stop", "{}")


@pytest.mark.parametrize("choice", FORCED)
@pytest.mark.parametrize("known", [True, False])
def test_a_call_that_must_be_is_made_and_follows_its_schema(
    server: RunningServer, unknowing: RunningServer, known: bool, choice: dict[str, Any]
) -> None:
    names = set()
    for seed in range(3):
        answer = ask(server if known else unknowing, seed=seed, **choice).choices[0]
        (call,) = answer.message.tool_calls
        check(call)
        names.add(call.function.name)
        assert answer.message.content is None
        assert answer.finish_reason == "tool_calls"
    assert choice["tool_choice"] == "required" or names == {"weather"}


def test_a_forced_call_is_what_the_target_says_under_the_grammar(
    server: RunningServer, knowing: Target
) -> None:
    """With speculation on; several calls with what stands between them."""
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    mask = Grammars(knowing).calls(TAGGED, tools, must=True, one=False)
    model = EagleModel(knowing)
    ids = knowing.render(MESSAGES, tools=[tool.for_template() for tool in tools])
    own = model.generate(ids, SamplingParams(max_new_tokens=200, temperature=1.0, seed=3, token_mask=mask))
    body = server.chat(
        "the heat", tools=TOOLS, tool_choice="required", max_tokens=200, seed=3, return_token_ids=True
    ).json()
    assert body["prompt_token_ids"] == ids
    assert body["choices"][0]["token_ids"] == own.token_ids
    assert body["usage"]["speculation"]["accepted"] > 0
    reader = ToolCallReader(TAGGED, ["weather", "stop"])
    reader.push(own.text)
    calls = body["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [call.arguments for call in reader.calls]
    assert len(calls) > 1


def test_a_call_that_is_streamed_is_the_call(server: RunningServer) -> None:
    options: dict[str, Any] = {"tool_choice": "required", "max_tokens": 90, "n": 2}
    whole = ask(server, **options)
    calls: list[list[dict[str, str]]] = [[], []]
    reasons, deltas = [None, None], 0
    for chunk in ask(server, **options, stream=True):
        for choice in chunk.choices:
            assert not choice.delta.content
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            for delta in choice.delta.tool_calls or ():
                deltas += 1
                made = calls[choice.index]
                if delta.index == len(made):
                    assert (delta.type, bool(delta.id)) == ("function", True)
                    made.append({"name": delta.function.name, "arguments": ""})
                made[delta.index]["arguments"] += delta.function.arguments
    expected = [
        [
            {"name": call.function.name, "arguments": call.function.arguments}
            for call in choice.message.tool_calls
        ]
        for choice in whole.choices
    ]
    assert calls == expected
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert deltas > 2 * sum(map(len, calls)), "arguments come in pieces"
    assert {"length", "tool_calls"} >= set(reasons)


def test_the_clients_stream_helper_puts_a_call_together(server: RunningServer) -> None:
    with server.openai().chat.completions.stream(
        model=NAME, messages=MESSAGES, tools=FUNCTIONS[:1], tool_choice=WEATHER, max_tokens=300, seed=1
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = answer.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_call_of_the_models_choice_is_taken_out_of_its_text(knowing: Target) -> None:
    """The random target is made to like the letter that begins one; strict arguments follow their schema."""
    tokenizer = copy.copy(knowing.tokenizer)
    tokenizer.chat_template = tool_templates.BARE
    model = EagleModel(dataclasses.replace(knowing, tokenizer=tokenizer))
    brace = {str(tokenizer.encode("{")[0]): 100.0}
    with running_server(model) as server:
        answer = ask(server, tools=TOOLS[:1], logit_bias=brace, parallel_tool_calls=False).choices[0]
        (call,) = answer.message.tool_calls
        check(call)
        assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
        text = ask(server, max_tokens=20).choices[0]
        assert text.message.content
        assert text.message.tool_calls is None
        assert text.finish_reason in ("stop", "length")


def test_tools_are_shown_to_the_target_unless_it_may_not_call_any(
    server: RunningServer, knowing: Target
) -> None:
    def prompt(**fields: Any) -> list[int]:
        body = server.chat("the heat", max_tokens=1, return_token_ids=True, **fields).json()
        return body["prompt_token_ids"]

    tools = [Tool.model_validate(tool).for_template() for tool in TOOLS]
    assert prompt() == prompt(tools=TOOLS, tool_choice="none") == prompt(tools=[]) == knowing.render(MESSAGES)
    assert prompt(tools=TOOLS) == knowing.render(MESSAGES, tools=tools)
    assert prompt(tools=TOOLS, tool_choice=WEATHER) == prompt(tools=TOOLS)


def history(call: Any) -> list[Any]:
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "12 degrees"}]}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    return [*MESSAGES, assistant, result]


def test_what_a_call_gave_goes_back_to_the_target(server: RunningServer, knowing: Target) -> None:
    (call,) = ask(server, tool_choice=WEATHER).choices[0].message.tool_calls
    answer = ask(server, messages=history(call), max_tokens=20, extra_body={"return_token_ids": True})
    text = knowing.tokenizer.decode(answer.model_dump()["prompt_token_ids"])
    arguments = json.dumps(json.loads(call.function.arguments), ensure_ascii=False)
    assert f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>' in text
    assert "<|im_start|>tool\n12 degrees" in text


def test_a_template_without_tools_has_them_told_in_words(unknowing: RunningServer, target: Target) -> None:
    (call,) = ask(unknowing, tool_choice=WEATHER).choices[0].message.tool_calls
    answer = ask(
        unknowing,
        messages=history(call),
        tool_choice="none",
        max_tokens=5,
        extra_body={"return_token_ids": True},
    )
    text = target.tokenizer.decode(answer.model_dump()["prompt_token_ids"])
    assert f'<|im_start|>assistant\n{{"name": "weather", "arguments": {call.function.arguments}' in text
    assert "<|im_start|>user\nResult of weather: 12 degrees<|im_end|>" in text
    body = unknowing.chat(
        "hi", tools=TOOLS[1:], tool_choice="required", max_tokens=1, return_token_ids=True
    ).json()
    told = target.tokenizer.decode(body["prompt_token_ids"])
    assert told.startswith("<|im_start|>system\nYou can call these functions:")
    assert '"name": "stop"' in told
    with pytest.raises(openai.BadRequestError, match="chat template knows no tools") as caught:
        ask(unknowing)
    assert (caught.value.param, caught.value.code) == ("tools", "unsupported_parameter")


def test_special_tokens_around_a_call_are_seen(target: Target) -> None:
    """Such as Mistral's, which have no text."""
    tokenizer = target.tokenizer
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    reader = ToolCallReader(NAMED, ["f"])
    answer = Answer(
        tokenizer,
        end_ids={tokenizer.eos_token_id},
        max_tokens=99,
        reader=reader,
        markers={start: "[TOOL_CALLS]"},
    )
    text = answer.push(
        [*tokenizer.encode("so"), start, *tokenizer.encode('f{"a": 1}'), tokenizer.eos_token_id]
    )
    assert (text, answer.finish_reason) == ("so", "tool_calls")
    assert [(call.name, call.arguments) for call in answer.calls] == [("f", '{"a": 1}')]


USER = MESSAGES[0]
STOP = TOOLS[1]
STRICT = {"type": "function", "function": {"name": "stop", "strict": True}}
CALL = {"id": "c1", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "x", "tool_call_id": "c1"}
LISTED = {"name": "f", "arguments": "[1]"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{**STOP, "x": 1}]}, "tools[0].x"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [STOP, STOP]}, "tools"),
    ({"tools": [STOP] * 129}, "tools"),
    ({"tools": [STOP], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [STOP], "tool_choice": WEATHER}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [STOP], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ({"tools": [STRICT], "ignore_eos": True}, "ignore_eos"),
    ({"tools": [STOP], "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [STOP], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    ({"messages": [USER, CALLED, {**RESULT, "tool_call_id": "c2"}]}, "messages[2].tool_call_id"),
    (
        {"messages": [USER, {**CALLED, "tool_calls": [{**CALL, "function": LISTED}]}]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"messages": [USER, {**CALLED, "tool_calls": [{**CALL, "x": 1}]}]}, "messages[1].tool_calls[0].x"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/no"}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_what_cannot_be_is_refused(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [USER], "max_tokens": 5, **fields}
    response = server.client.post(f"{server.url}/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "\n" not in error["message"]
