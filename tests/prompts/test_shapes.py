from __future__ import annotations

import json

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
    "OASST tree": ({"message_tree_id": "t", "prompt": TREE}, ("one", "two"), ""),
    "OASST root": ({"message_id": "m", "parent_id": None, "text": "one", "role": "prompter"}, ("one",), ""),
}
REJECTS = {
    "not_an_object": [["one"], "one", None, 3],
    "no_prompt_field": [{"title": "x"}, {}, {"prompt": 5}, {"data": [1]}],
    "no_user_text": [{"prompt": "  "}, {"messages": [CHAT[2]]}, {"turns": []}, {"conversations": []}],
    "not_text": [
        {"messages": [{"role": "user", "content": PICTURE}]},
        {"prompt": {"text": 3, "role": "prompter"}},
    ],
    "unknown_role": [{"messages": [{"role": "narrator", "content": "x"}]}],
    "tool_messages": [
        {"messages": [CHAT[1], {"role": "tool", "content": "{}"}]},
        {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "{}"}]},
    ],
    "malformed_messages": [{"messages": [{"speaker": "user"}]}, {"messages": [CHAT[1], "two"]}],
    "not_a_prompt": [
        {"message_id": "m", "parent_id": None, "text": "x", "role": "assistant"},
        {"message_id": "m", "parent_id": "p", "text": "x", "role": "prompter"},
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
    [({"id": 7}, "7"), ({"id": "x"}, "x"), ({"id": ""}, "src:1"), ({"id": None}, "src:1"),
     ({"id": True}, "src:1"), ({"conversation_id": "c"}, "c")],
)  # fmt: skip
def test_rows_keep_their_own_ids(row, name):
    found = read_row({"prompt": "one", **row}, "src", "src:1", "here")
    assert isinstance(found, Prompt)
    assert found.id == name
