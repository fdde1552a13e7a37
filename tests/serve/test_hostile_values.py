"""Values that JSON can spell and a server must survive: halves of characters, great depths, odd keys."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stages.serve.api_error import MESSAGE_SHOWN, PARAM_SHOWN, VALUE_SHOWN, one_line, shown
from tests.serve.running_server import RunningServer

HALF = "\ud800"
LINES = "a\r\n\u2028\x00\x1b[31mb"
LONG = "k" * 100_000
USER = {"role": "user", "content": "x"}


def nested(depth: int, leaf: Any = 1, *, lists: bool = True) -> Any:
    """A value with `depth` lists or objects around `leaf`."""
    for _ in range(depth):
        leaf = [leaf] if lists else {"a": leaf}
    return leaf


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "c"},
    ]


DEEP, DEEP_OBJECT = nested(900), nested(900, lists=False)
OBJECTS: list[Any] = [{HALF: 1}, {"a": HALF}, {"a": {"b": [HALF]}}, {LINES: 1}, {LONG: 1}, {"a": DEEP}]
FIELDS = (
    "stream_options logit_bias stop response_format messages tools tool_choice best_of chat_template_kwargs"
)
BODIES: list[dict[str, Any]] = [
    *(
        {field: value}
        for value in (HALF, LINES, DEEP, DEEP_OBJECT, *OBJECTS[:-1])
        for field in FIELDS.split()
    ),
    *({"messages": [{**USER, **each}]} for each in OBJECTS),
    *({"tools": [tool(**each)], "tool_choice": "required"} for each in OBJECTS),
    *({"tools": [tool(parameters=each)], "tool_choice": "required"} for each in OBJECTS),
    *({"tools": [tool(parameters={"properties": each})], "tool_choice": "required"} for each in OBJECTS),
    *({"response_format": schema_format(each)} for each in OBJECTS),
    *({"messages": called(json.dumps(each))} for each in OBJECTS),
    *({"messages": called(text)} for text in ('{"a": 1' + "0" * 5000 + "}", '{"a": NaN}', "[" * 5000)),
    *OBJECTS,
]


def test_they_are_answered_or_refused_in_one_short_line(server: RunningServer) -> None:
    for body in BODIES:
        content = json.dumps({"messages": [USER], "max_tokens": 1, **body})
        response = server.client.post(
            f"{server.url}/v1/chat/completions",
            content=content,
            headers={"Content-Type": "application/json"},
        )
        assert response.status_code in (200, 400), (content[:200], response.text)
        assert server.log[-1].isprintable()
        if response.status_code == 400:
            error = response.json()["error"]
            assert error["message"].isprintable()
            assert len(error["message"]) <= MESSAGE_SHOWN
            assert (error["param"] or "-").isprintable()
            assert len(error["param"] or "") <= PARAM_SHOWN
        if HALF.encode("unicode_escape").decode() in content:
            assert response.status_code == 400, content


@given(st.text())
def test_a_line_is_short_and_prints_and_plain_text_is_as_it_is(text: str) -> None:
    line = one_line(text, 20)
    assert line.isprintable()
    assert len(line) <= 20
    if text.isprintable() and len(text) <= 20:
        assert line == text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda each: st.lists(each) | st.dictionaries(st.text(), each),
    )
)
def test_a_value_is_shown_as_it_is_where_it_is_short(value: Any) -> None:
    text = shown(value)
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= VALUE_SHOWN
    if not isinstance(value, list | dict) and len(ascii(value)) <= VALUE_SHOWN:
        assert text == ascii(value)


def test_a_value_of_any_depth_is_shown() -> None:
    """Deeper than Python's stack, as JSON cannot be."""
    assert shown(nested(100_000)) == "[[[[[[[...]]]]]]]"
