"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.decoding import EagleModel
from stages.serve.app import Access
from stages.serve.prompt_ids import text_ids
from stages.serve.served_model import ServedModel
from stages.serve.tokenization import DetokenizeBody, TokenizeText, detokenized, tokenized
from stages.targets import Target
from tests.serve.running_server import NAME, RunningServer, running_server

USER = {"role": "user", "content": "où est 日本?"}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "does it"}}


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return server.client.post(server.url + path, json=body)


@settings(deadline=None, max_examples=50)
@given(text=st.text())
def test_text_comes_back_from_its_ids(target: Target, text: str) -> None:
    model = ServedModel.of(target)
    found = tokenized(model, TokenizeText(prompt=text, return_token_strs=True))
    assert (found.count, found.max_model_len) == (len(found.tokens), 512)
    assert found.tokens == target.tokenizer(text)["input_ids"]
    assert target.tokenizer.convert_tokens_to_ids(found.token_strs) == found.tokens
    assert detokenized(model, DetokenizeBody(tokens=found.tokens)).prompt == text


def test_a_chat_is_what_a_completion_of_it_reads(server: RunningServer) -> None:
    begun = {"role": "assistant", "content": "So"}
    for chat in (
        {"messages": [USER]},
        {"messages": [USER, begun], "continue_final_message": True},
        {"messages": [USER], "add_generation_prompt": False},
    ):
        found = post(server, "/tokenize", **chat).json()
        asked = post(server, "/v1/chat/completions", **chat, max_tokens=1, return_token_ids=True).json()
        assert found["tokens"] == asked["prompt_token_ids"]
        assert found["count"] == asked["usage"]["prompt_tokens"]
        assert found["token_strs"] is None
    text = post(server, "/detokenize", model=NAME, tokens=found["tokens"]).json()
    assert text == {"prompt": "<|im_start|>user\noù est 日本?<|im_end|>\n"}
    told = post(server, "/tokenize", messages=[USER], tools=[FUNCTION]).json()["tokens"]
    assert "does it" in post(server, "/detokenize", tokens=told).json()["prompt"]
    long = post(server, "/tokenize", prompt="a" * 5000).json()
    assert long["count"] > long["max_model_len"]


def test_a_start_of_the_text_is_left_out_if_it_is_not_wanted(target: Target) -> None:
    class Starting:
        def __call__(self, text: str, *, add_special_tokens: bool, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [7] * add_special_tokens + target.tokenizer(text)["input_ids"]}

    model = ServedModel("x", Starting, 5)  # type: ignore[arg-type]
    model.__dict__["target"] = type("T", (), {"tokenizer": Starting(), "vocab_size": 512})()
    assert tokenized(model, TokenizeText(prompt="a")).tokens[0] == 7
    assert tokenized(model, TokenizeText(prompt="a", add_special_tokens=False)).tokens[0] != 7
    assert text_ids(model, "a") == [7, *text_ids(model, "a", special=False)]


REFUSED: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt"),
    ("/tokenize", {"prompt": "a", "nonsense": 1}, 400, "nonsense"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"messages": [USER, {**USER, "name": "x"}]}, 400, "messages[1].name"),
    ("/tokenize", {"messages": [USER], "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs.x"),
    ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": [512]}, 400, "tokens"),
    ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param"), REFUSED)
def test_bad_requests_are_refused(
    server: RunningServer, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = post(server, path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_they_are_behind_the_key_and_the_limits(plain: EagleModel) -> None:
    access = Access(api_keys=("sk-right",), rate_limit=2, max_body=1000)
    with running_server(plain, access=access) as server:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
            assert httpx.post(server.url + path, json=body).status_code == 401
            right = httpx.post(server.url + path, json=body, headers={"Authorization": "Bearer sk-right"})
            assert right.status_code == 200
        for path in ("/tokenize", "/detokenize"):
            limited = httpx.post(server.url + path, headers={"Authorization": "Bearer sk-right"})
            assert limited.status_code == 429
    with running_server(plain, access=Access(max_body=1000)) as server:
        assert post(server, "/tokenize", prompt="a" * 1000).status_code == 413
