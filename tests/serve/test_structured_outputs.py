"""structured_outputs, vLLM's field: JSON, a pattern, or one of a few texts."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.serve.grammar import Grammars
from stages.serve.structure import Structure
from stages.targets import Target
from tests.serve.running_server import RunningServer

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}


def both(server: RunningServer, seed: int, **outputs: Any) -> str:
    """The text of an answer that ended by itself, which is the same with drafts and without."""
    fields = {"structured_outputs": outputs, "seed": seed, "max_tokens": 120}
    bodies = [server.chat(speculative=each, **fields).json() for each in (True, False)]
    first, second = (body["choices"][0] for body in bodies)
    assert first == second
    assert first["finish_reason"] == "stop"
    return first["message"]["content"]


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_is_what_was_asked_for(server: RunningServer, seed: int) -> None:
    pattern = r"[a-f]{3,9}-(\d{2}|\u00e9+!|\n)"
    assert re.fullmatch(pattern, both(server, seed, regex=pattern))
    assert both(server, seed, choice=["yes", 'no, "never"', "\u00e9\U0001f389\x7f"]) in (
        "yes",
        'no, "never"',
        "\u00e9\U0001f389\x7f",
    )
    closed = {**SCHEMA, "additionalProperties": False}
    for schema in (closed, json.dumps(closed)):
        assert both(server, seed, json=schema) in ('{"a": 1}', '{"a": 2}')


def test_any_object_may_be_asked_for(server: RunningServer) -> None:
    body = server.complete("x", structured_outputs={"json_object": True}, max_tokens=20, seed=1).json()
    assert body["choices"][0]["text"].startswith("{")


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), min_size=1, max_size=4
    )
)
def test_options_of_any_characters_can_be_written_and_nothing_else_ends(
    target: Target, options: list[str]
) -> None:
    mask = Grammars(target).of(Structure("structured_outputs", options=tuple(options)))
    eos = target.tokenizer.eos_token_id
    for option in options:
        ids = target.tokenizer(option, add_special_tokens=False)["input_ids"]
        for end, token in enumerate(ids):
            allowed = mask(ids[:end])
            assert allowed[token]
            assert bool(allowed[eos]) == (target.tokenizer.decode(ids[:end]) in options)
        assert mask(ids)[eos]


BEYOND = "(a?){2000}a{2000}"  # compiles, and is too much where the first token is followed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"regex": BEYOND}}, "the pattern cannot be followed: "),
        (
            {"structured_outputs": {"json": {"type": "string", "pattern": f"^{BEYOND}$"}}},
            "the schema cannot be followed: ",
        ),
    ],
)
def test_what_cannot_be_followed_to_the_end_is_an_error_and_no_free_text(
    server: RunningServer, fields: dict[str, Any], message: str
) -> None:
    fields = {**fields, "max_tokens": 30}
    for drafts in (True, False):
        response = server.chat(speculative=drafts, **fields)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(message)
        stream = server.chat(speculative=drafts, stream=True, **fields)
        assert message in stream.text.split("\n\n")[-3]
        assert server.chat(max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {"regex": r"\bword\b"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "[1"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": [SCHEMA]}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
        (
            {
                "structured_outputs": {"regex": "a"},
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
            },
            "structured_outputs",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    response = server.chat(**fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "\n" not in error["message"]
