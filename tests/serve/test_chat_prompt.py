"""What a request may say of its prompt: variables of the chat template, and where the answer goes on."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

from stages.decoding import EagleModel, SamplingParams
from stages.serve.api_error import ApiError
from stages.serve.chat_prompt import (
    MAX_VARIABLE_CHARACTERS,
    MAX_VARIABLE_DEPTH,
    MAX_VARIABLE_NUMBER,
    MAX_VARIABLE_VALUES,
    ChatPrompt,
)
from stages.serve.prompt_ids import chat_ids
from stages.serve.served_model import ServedModel
from stages.targets import Target
from tests.serve.running_server import RunningServer

USER = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "So far "}
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<no thoughts>' }}{% endif %}"
    "{% for each in range(times or 0) %}{{ style }}{% endfor %}{% endif %}"
)


@pytest.fixture(scope="module")
def model(target: Target) -> ServedModel:
    tokenizer = copy.copy(target.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return ServedModel.of(dataclasses.replace(target, tokenizer=tokenizer))


def prompt(**fields: Any) -> ChatPrompt:
    chat = ChatPrompt.model_validate({"messages": [USER], **fields})
    chat.refuse_prompt()
    return chat


def text(model: ServedModel, **fields: Any) -> str:
    return model.target.tokenizer.decode(chat_ids(model, prompt(**fields), []))


def test_the_template_sees_the_variables_that_it_asks_for(model: ServedModel) -> None:
    head = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text(model) == text(model, chat_template_kwargs={}) == head
    assert text(model, chat_template_kwargs={"enable_thinking": False}) == head + "<no thoughts>"
    assert text(model, chat_template_kwargs={"enable_thinking": True}) == head
    assert text(model, chat_template_kwargs={"times": 2, "style": "{{ 7*7 }}"}) == head + "{{ 7*7 }}" * 2


OURS = "messages tools documents tokenize add_generation_prompt continue_final_message chat_template self"
OURS += " conversation return_dict return_tensors padding max_length tokenizer_kwargs eos_token range"


@pytest.mark.parametrize("name", [*OURS.split(), "unknown", "__class__", "a\nb", ""])
def test_what_the_template_does_not_ask_for_is_refused_and_so_is_what_others_give_it(
    model: ServedModel, name: str
) -> None:
    with pytest.raises(ApiError, match="does not use; it takes enable_thinking, style, times") as caught:
        text(model, chat_template_kwargs={name: "x"})
    assert caught.value.code == "unsupported_parameter"


def deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("fits", "too_much", "message"),
    [
        (MAX_VARIABLE_NUMBER, MAX_VARIABLE_NUMBER + 1, "a number is beyond"),
        (-float(MAX_VARIABLE_NUMBER), float("nan"), "a number is beyond"),
        (deep(MAX_VARIABLE_DEPTH - 1), deep(MAX_VARIABLE_DEPTH), "within one another"),
        ([None] * (MAX_VARIABLE_VALUES - 3), [None] * (MAX_VARIABLE_VALUES - 2), "values or"),
        ("x" * (MAX_VARIABLE_CHARACTERS - 1), "x" * MAX_VARIABLE_CHARACTERS, "characters are not taken"),
        ([True, False], [{"\ud800": 1}], "a surrogate stands alone"),
    ],
)
def test_variables_are_of_modest_size(fits: Any, too_much: Any, message: str) -> None:
    assert prompt(chat_template_kwargs={"v": fits}).chat_template_kwargs == {"v": fits}
    with pytest.raises(ValidationError, match=message):
        prompt(chat_template_kwargs={"v": too_much})


@pytest.mark.parametrize("times", ["x", [1], {"a": 1}, 1.5, MAX_VARIABLE_NUMBER])
def test_a_variable_that_the_template_cannot_work_with_is_refused(model: ServedModel, times: Any) -> None:
    with pytest.raises(ApiError, match="refuses the messages") as caught:
        text(model, chat_template_kwargs={"times": times, "style": "x"})
    assert caught.value.status == 400


def test_the_last_message_is_gone_on_with_or_another_begun_or_neither(model: ServedModel) -> None:
    told = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSo far"
    messages = [USER, BEGUN]
    assert text(model, messages=messages, add_generation_prompt=False) == told + " <|im_end|>\n"
    for ask in ({}, {"add_generation_prompt": False}):
        assert text(model, messages=messages, continue_final_message=True, **ask) == told + " "
    parts = {
        "role": "assistant",
        "content": [{"type": "text", "text": "So"}, {"type": "text", "text": "far"}],
    }
    assert text(model, messages=[USER, parts], continue_final_message=True).endswith("assistant\nSo\nfar")
    marked = {**BEGUN, "content": "CONTINUE_FINAL_MESSAGE_TAG x"}
    assert text(model, messages=[marked, marked], continue_final_message=True).endswith(marked["content"])
    empty = {**BEGUN, "content": ""}
    assert text(model, messages=[USER, empty], continue_final_message=True) == text(model)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"messages": [BEGUN, USER]},
        {"messages": [USER, {**BEGUN, "tool_calls": [CALL]}]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]},
        {"messages": [USER, BEGUN], "add_generation_prompt": True},
    ],
)
def test_only_what_the_assistant_says_can_be_gone_on_with(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        prompt(continue_final_message=True, **fields)
    assert caught.value.param == "continue_final_message"


def test_an_answer_goes_on_where_the_message_ends(server: RunningServer, plain: EagleModel) -> None:
    prompt_ids = [*plain.encode([USER]), *plain.target.tokenizer.encode("So far")]
    own = plain.generate(prompt_ids, SamplingParams(max_new_tokens=20, ignore_eos=True))
    body = {"messages": [USER, {**BEGUN, "content": "So far"}], "continue_final_message": True}
    body |= {"temperature": 0, "ignore_eos": True, "max_tokens": 20, "return_token_ids": True}
    found = server.client.post(f"{server.url}/v1/chat/completions", json=body).json()
    assert found["prompt_token_ids"] == prompt_ids
    assert found["choices"][0]["token_ids"] == own.token_ids
    assert found["choices"][0]["message"]["content"] == own.text
