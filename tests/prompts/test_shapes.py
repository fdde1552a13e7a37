from __future__ import annotations

import json
from datetime import date

import pytest

from stages.prompts import Prompt, Rejected
from stages.prompts.shapes import read_row

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "someone else's answer"},
    {"role": "user", "content": "two"},
]
SHAREGPT = [
    {"from": "gpt", "value": "Hello!"},
    {"from": "human", "value": "one"},
    {"from": "gpt", "value": None},
    None,
    {"from": "human", "value": " "},
    {"from": "human", "value": "two"},
]
NAN = float("nan")
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "more"}]
PICTURE = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "What is it?"}]
TREE = {
    "text": "one",
    "role": "prompter",
    "replies": [
        {
            "text": "someone's answer",
            "role": "assistant",
            "replies": [{"text": "two", "role": "prompter", "replies": []}],
        },
        {"text": "another", "role": "assistant", "replies": [{"text": "three", "role": "prompter"}]},
    ],
}
SHAPES = {
    "turns": ({"turns": ["one", "two"]}, ("one", "two"), ""),
    "turns with blanks and nulls": ({"turns": ["one", " ", None, "two"]}, ("one", "two"), ""),
    "turns as messages": ({"turns": CHAT}, ("one", "two"), "Be brief."),
    "messages": ({"messages": CHAT}, ("one", "two"), "Be brief."),
    "conversations, dirty": ({"conversations": SHAREGPT}, ("one", "two"), ""),
    "conversation": ({"conversation": CHAT, "conversation_hash": "x"}, ("one", "two"), "Be brief."),
    "messages with text": ({"messages": [{"role": "User", "text": "one"}]}, ("one",), ""),
    "messages as JSON text": ({"messages": json.dumps(CHAT)}, ("one", "two"), "Be brief."),
    "parts of text": ({"messages": [{"role": "user", "content": PARTS}]}, ("one\nmore",), ""),
    "developer message": ({"messages": [{"role": "developer", "content": "s"}, CHAT[1]]}, ("one",), "s"),
    "late system message": ({"messages": [CHAT[1], {"role": "system", "content": "x"}]}, ("one",), ""),
    "UltraChat": ({"id": "7", "data": ["one", "answer", "two", "answer"]}, ("one", "two"), ""),
    "Alpaca": ({"instruction": "one", "input": "two", "output": "x"}, ("one\n\ntwo",), ""),
    "Alpaca without input": ({"instruction": "one", "input": "", "output": "x"}, ("one",), ""),
    "Dolly": ({"instruction": "one", "context": "two", "response": "x"}, ("one\n\ntwo",), ""),
    "prompt": ({"prompt": "one", "completion": "x"}, ("one",), ""),
    "prompt as messages": ({"prompt": CHAT}, ("one", "two"), "Be brief."),
    "prompt is null": ({"prompt": None, "question": "one"}, ("one",), ""),
    "question": ({"question": "one", "answer": "x", "system": "s"}, ("one",), "s"),
    "text": ({"text": "one"}, ("one",), ""),
    "preferences": ({"chosen": CHAT, "rejected": CHAT}, ("one", "two"), "Be brief."),
    "messages as Python prints them": ({"messages": str(CHAT)}, ("one", "two"), "Be brief."),
    "messages as numpy prints them": (
        {"messages": "[" + "\n ".join(map(str, CHAT)) + "]"},
        ("one", "two"),
        "Be brief.",
    ),
    "messages as columns": (
        {"messages": {"role": ["user", "user"], "content": ["one", "two"]}},
        ("one", "two"),
        "",
    ),
    "messages alone": (CHAT, ("one", "two"), "Be brief."),
    "messages as data": ({"data": CHAT}, ("one", "two"), "Be brief."),
    "messages beside empty turns": ({"turns": [], "conversation": None, "prompt": "one"}, ("one",), ""),
    "nulls of tables": ({"messages": NAN, "turns": ["one", NAN, "two"], "prompt": NAN}, ("one", "two"), ""),
    "texts that are NaN": ({"messages": [CHAT[1], {"role": "user", "content": NAN}]}, ("one",), ""),
    "roles with marks": ({"messages": [{"role": "<|User|>:", "content": "one"}]}, ("one",), ""),
    "names with capitals and blanks": ({" Question ": "one", "Answer": "x"}, ("one",), ""),
    "Alpaca, input only": ({"instruction": " ", "input": "one"}, ("one",), ""),
    "text that is JSON": ({"prompt": '[{"a": 1}, {"b": 2}]'}, ('[{"a": 1}, {"b": 2}]',), ""),
    "system message that no one sees": (
        {"messages": [{"role": "system", "content": "\u200b"}, CHAT[1]]},
        ("one",),
        "",
    ),
    "OASST tree": ({"message_tree_id": "t", "prompt": TREE}, ("one", "two"), ""),
    "OASST root": ({"message_id": "m", "parent_id": None, "text": "one", "role": "prompter"}, ("one",), ""),
}
REJECTS = {
    "not_an_object": [["one"], "one", None, 3],
    "no_prompt_field": [{"title": "x"}, {}, {"prompt": 5}, {"data": [1]}],
    "no_user_text": [
        {"prompt": "  "},
        {"prompt": "\u200b\ufeff\u2060\xad"},
        {"text": "\u2800\u3164"},
        {"messages": [CHAT[2]]},
        {"turns": []},
        {"conversations": []},
    ],
    "not_text": [
        {"messages": [{"role": "user", "content": PICTURE}]},
        {"prompt": {"text": 3, "role": "prompter"}},
    ],
    "unknown_role": [{"messages": [{"role": "narrator", "content": "x"}]}],
    "tool_messages": [
        {"messages": [CHAT[1], {"role": "tool", "content": "{}"}]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "{}"}]},
        {"messages": [CHAT[1], {"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
    ],
    "malformed_messages": [{"messages": [{"speaker": "user"}]}, {"messages": [CHAT[1], "two"]}],
    "inside_conversation": [
        {"message_id": "m", "parent_id": None, "text": "x", "role": "assistant"},
        {"message_id": "m", "parent_id": "p", "text": "x", "role": "prompter"},
        {"id": "QWJhYvA_17", "conversations": [{"from": "human", "value": "continue"}]},
        {"id": "i6IyJda_1", "conversations": SHAREGPT},
    ],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_users_turns_are_taken_from_every_shape_and_nothing_else_is(shape):
    row, turns, system = SHAPES[shape]
    found = read_row(row, "src", "src:1", "src, line 1")
    assert isinstance(found, Prompt), str(found)
    assert (found.turns, found.system) == (turns, system)


@pytest.mark.parametrize(
    ("reason", "row"), [(reason, row) for reason, rows in REJECTS.items() for row in rows]
)
def test_what_is_no_prompt_is_rejected_with_its_reason_and_place(reason, row):
    found = read_row(row, "src", "src:1", "src, line 1")
    assert isinstance(found, Rejected)
    assert found.reason == reason
    assert str(found).startswith("src, line 1 ")
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"ask": "one", "prompt": "two"}, ("one",)),
        ({"ask": ["one", "two"]}, ("one", "two")),
        ({"ask": CHAT}, ("one", "two")),
        ({"ask": TREE}, ("one", "two")),
    ],
)
def test_a_field_can_be_chosen(row, turns):
    found = read_row(row, "src", "1", "here", field="ask")
    assert isinstance(found, Prompt)
    assert found.turns == turns


def test_a_row_without_the_chosen_field_is_rejected_though_it_has_a_known_one():
    found = read_row({"prompt": "one"}, "src", "1", "here", field="ask")
    assert isinstance(found, Rejected)
    assert found.detail == "has no ask, its keys are: prompt"


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"id": 7}, "7"),
        ({"id": 7.0}, "7"),
        ({"id": " x "}, "x"),
        ({"id": "\ud800"}, "\ufffd"),
        ({"conversation_id": "c"}, "c"),
        ({"id": None, "message_id": "m"}, "m"),
        ({"id": "QWJhYvA_3"}, "QWJhYvA_3"),
        ({"id": "QWJhYvA_0", "conversations": CHAT}, "QWJhYvA_0"),
        ({"id": "example_3", "conversations": CHAT}, "example_3"),
        *(
            ({"id": value}, "src:1")
            for value in ("", None, True, 1.5, float("inf"), [1], 10**400, "a\nb", "\x1b[31m", "x" * 201)
        ),
    ],
)
def test_rows_keep_their_own_ids(row, name):
    found = read_row({"prompt": "one", **row}, "src", "src:1", "here")
    assert isinstance(found, Prompt)
    assert found.id == name


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ([{"name": "f"}], '[{"name": "f"}]'),
        ('[ {"name": "f"} ]', '[{"name": "f"}]'),
        (['{"name": "f"}'], '[{"name": "f"}]'),
        ([{"name": "\ud83d"}], '[{"name": "\ufffd"}]'),
        ([{"since": date(2020, 1, 2)}], '[{"since": "2020-01-02"}]'),
        ("calculator", ""),
        ([{"name": "f"}, None], ""),
        ([], ""),
    ],
)
def test_tools_are_kept_as_json_however_they_are_written(tools, text):
    found = read_row({"prompt": "one", "tools": tools}, "src", "1", "here")
    assert isinstance(found, Prompt)
    assert found.tools == text


def test_tools_nested_too_deeply_are_none():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    found = read_row({"prompt": "one", "tools": [{"x": deep}]}, "src", "1", "here")
    assert isinstance(found, Prompt)
    assert found.tools == ""


@pytest.mark.parametrize("row", [{"a\nb\x1b": 1}, {f"k{i}" * 50: 1 for i in range(1000)}, {1: 2, None: 3}])
def test_a_row_that_is_no_prompt_is_described_in_a_line_of_bounded_length(row):
    detail = str(read_row(row, "src", "1", "here"))
    assert detail.isprintable()
    assert len(detail) < 1000


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("Why?Share Prompt", "Why?"),
        ("Why? 2 / 3", "Why? 2 / 3"),
        ("What is 2 / 3", "What is 2 / 3"),
        ("x=2 / 3", "x=2 / 3"),
        ("graph3 / 2", "graph3 / 2"),
        ("graph1 / 2", "graph"),
        ("The end.\n 2 / 2", "The end."),
        (
            "Why?\n \n \uc9c0\uae08 \ubc88\uc5ed\ud558\uae30\n CopyCopy HTMLRead Aloud7 chars | 2 words",
            "Why?",
        ),
        ("Why?\n \n Translate now", "Why?"),
        ("Please share prompt ideas", "Please share prompt ideas"),
    ],
)
def test_what_page_buttons_left_behind_sharegpt_texts_is_gone(said, meant):
    row = {"conversations": [{"from": "human", "value": said}, {"from": "human", "value": "Share Prompt"}]}
    found = read_row(row, "src", "1", "here")
    assert isinstance(found, Prompt)
    assert found.turns == (meant,)
    kept = read_row({"messages": [{"role": "user", "content": said}]}, "src", "1", "here")
    assert isinstance(kept, Prompt)
    assert kept.turns == (said,)


def test_a_note_about_where_a_page_was_shared_from_is_no_system_message():
    note = "*This chat conversation is shared from [**TypingMind.com**](https://typingmind.com)*"
    row = {"conversations": [{"from": "system", "value": note}, {"from": "human", "value": "one"}]}
    found = read_row(row, "src", "1", "here")
    assert isinstance(found, Prompt)
    assert found.system == ""


@pytest.mark.parametrize(
    "text",
    [
        "\u0645\u0631\u062d\u0628\u0627 \u202bRTL\u202c",
        "a\u200bb",
        "\U0001f468\u200d\U0001f469",
        "!",
        "\u0301",
        "x" * 1_000_000,
    ],
)
def test_text_that_shows_something_is_kept_as_it_is(text):
    found = read_row({"prompt": text}, "src", "1", "here")
    assert isinstance(found, Prompt)
    assert found.turns == (text,)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": None}, "its prompt holds null; eagle reads"),
        ({"prompt": 5, "text": b"x"}, "its prompt holds a number, text holds bytes"),
        ({"data": {"train": []}}, "its data holds an object"),
        ({"messages": True}, "its messages holds true or false"),
        ({"title": "x"}, "its keys are: title"),
    ],
)
def test_a_field_that_could_be_a_prompt_and_is_none_is_named_with_what_it_holds(row, said):
    found = read_row(row, "src", "src:1", "src, line 1")
    assert isinstance(found, Rejected)
    assert said in str(found)
