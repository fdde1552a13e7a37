"""Calls in an answer's text, whatever the pieces it comes in."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.serve.tool_calls import ToolCallReader
from stages.serve.tool_form import LISTED, LLAMA, NAMED, TAGGED, ToolForm

NAMES = ["f", "get_weather"]
F = '{"name": "f", "arguments": {"a": [1, {"b": "}\\"{"}]}}'
G = '{"name": "get_weather", "arguments": {}}'
CASES: list[tuple[ToolForm, str, str, list[tuple[str, str]]]] = [
    (TAGGED, "no call at all", "no call at all", []),
    (TAGGED, f"<tool_call>\n{G}\n</tool_call>", "", [("get_weather", "{}")]),
    (
        TAGGED,
        f"Let me see.\n<tool_call>\n{F}\n</tool_call>\n<tool_call>{G}</tool_call>\n",
        "Let me see.",
        [("f", '{"a": [1, {"b": "}\\"{"}]}'), ("get_weather", "{}")],
    ),
    (TAGGED, '<tool_call>{ "arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    (TAGGED, '<tool_call>{"name": "f"}</tool_call> and on', " and on", [("f", "{}")]),
    (TAGGED, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (TAGGED, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [("f", '{"x": 1}')]),
    (TAGGED, '<tool_call>{"type": "function", "n": 1, "name": "f", "arguments": {}}', "", [("f", "{}")]),
    (TAGGED, '<tool_call>{"name": "f", "arguments": {"x": "cut', "", [("f", '{"x": "cut')]),
    (TAGGED, f"<tool_call>\n{G}\n</tool", "", [("get_weather", "{}")]),
    (TAGGED, 'a \n<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, []),
    (TAGGED, "the tag <tool_call> means", None, []),
    (TAGGED, '<tool_call>{"name": 5, "arguments": {}}', None, []),
    (TAGGED, '<tool_call>{"name": "f", "arguments": [1]}', None, []),
    (TAGGED, '<tool_call>{"name": "f" "arguments": {}}', None, []),
    (TAGGED, '<tool_call>{"name": "f"', None, []),
    (TAGGED, "ends in <tool_c", None, []),
    (TAGGED, "ends in spaces  \n", None, []),
    (LISTED, f"[TOOL_CALLS] [{F}, {G}]", "", [("f", '{"a": [1, {"b": "}\\"{"}]}'), ("get_weather", "{}")]),
    (LISTED, f"Sure.[TOOL_CALLS][{G}]", "Sure.", [("get_weather", "{}")]),
    (LISTED, "[TOOL_CALLS] []", None, []),
    (NAMED, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{}', "", [("f", '{"a": 1}'), ("f", "{}")]),
    (NAMED, "[TOOL_CALLS]other[ARGS]{}", None, []),
    (NAMED, "[TOOL_CALLS]f[ARGS] is how", None, []),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (LLAMA, '\n{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}', "", [("f", "{}")] * 2),
    (LLAMA, '{"name": "f", "parameters": {}}\nDone.', "\nDone.", [("f", "{}")]),
    (LLAMA, '{"answer": 42}', None, []),
    (LLAMA, 'Say {"name": "f", "parameters": {}}', None, []),
]


def read(reader: ToolCallReader, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, the calls put together from their deltas."""
    content, calls, ids = "", [], set()
    for text in [*pieces, None]:
        content += reader.close() if text is None else reader.push(text)
        for delta in reader.drain():
            if delta.id is not None:
                assert delta.index == len(calls)
                calls.append((delta.name, ""))
                ids.add(delta.id)
            name, arguments = calls[delta.index]
            calls[delta.index] = (name, arguments + delta.arguments)
    assert calls == [(call.name, call.arguments) for call in reader.calls]
    assert len(ids) == len(calls)
    return content, calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_taken_out_and_the_rest_is_content(
    form: ToolForm, text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = (text if content is None else content, calls)
    assert read(ToolCallReader(form, NAMES), [text]) == expected
    assert read(ToolCallReader(form, NAMES), list(text)) == expected


WORDS = [*'{}[]:,"\\ \na1', '"name"', '"f"', '"arguments"', "null", F, G, "f"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]"]


@given(
    form=st.sampled_from([TAGGED, LISTED, NAMED, LLAMA]),
    words=st.lists(st.sampled_from(WORDS + MARKERS), max_size=12),
    cuts=st.sets(st.integers(0, 200)),
)
def test_what_is_read_depends_on_the_text_alone(form: ToolForm, words: list[str], cuts: set[int]) -> None:
    text = "".join(words)
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    content, calls = read(ToolCallReader(form, NAMES), pieces)
    assert (content, calls) == read(ToolCallReader(form, NAMES), [text])
    assert calls or content == text, "without a call nothing is lost"


def test_one_call_ends_the_answer_and_a_call_that_must_be_leaves_no_content() -> None:
    reader = ToolCallReader(TAGGED, NAMES, one=True)
    assert reader.push(f"a <tool_call>{G}") == "a"
    assert reader.done
    assert reader.push(f"</tool_call>b<tool_call>{F}</tool_call>") + reader.close() == ""
    assert len(reader.calls) == 1
    reader = ToolCallReader(LLAMA, NAMES, only=True)
    assert reader.push('{"name": "f", "para') + reader.close() == ""


def test_arguments_come_as_they_are_written() -> None:
    reader = ToolCallReader(TAGGED, NAMES)
    long = json.dumps({"text": "word " * 50})
    seen = []
    for char in f'<tool_call>{{"name": "f", "arguments": {long}}}</tool_call>':
        reader.push(char)
        seen.append(sum(len(call.arguments) for call in reader.calls))
    assert sum(after > before for before, after in itertools.pairwise(seen)) == len(long)
