"""The shapes that rows of chat data sets have, and how to take the users' turns from each.

Only what users wrote is taken. Answers that a source carries were written by other models or people; they are
neither the target's words nor, often, free to train on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from stages.prompts.messages import (
    USER_ROLES,
    NoPromptError,
    Said,
    is_message,
    is_null,
    listed,
    message_text,
    read_messages,
    shown_keys,
)
from stages.prompts.prompt import Prompt, Rejected
from stages.prompts.row import Broken
from stages.prompts.text import encodable, is_blank, one_line

MESSAGE_FIELDS = ("messages", "conversations", "conversation")
TEXT_FIELDS = ("prompt", "question", "instruction", "text", "query")
PREFERENCE_FIELDS = ("chosen",)
_READ = ("turns", *MESSAGE_FIELDS, "data", *TEXT_FIELDS, *PREFERENCE_FIELDS)
SHAPES = (
    "turns, messages, conversations, conversation, data, prompt, question, instruction (+ input or context), "
    "text, query or chosen"
)
TOOL_FIELDS = ("tools", "functions")
ID_FIELDS = ("id", "conversation_id", "message_tree_id", "message_id")
DETAIL_FIELDS = ("input", "context")  # what Alpaca and Dolly put beside an instruction
_FIELDS = {*MESSAGE_FIELDS, *TEXT_FIELDS, *PREFERENCE_FIELDS, *TOOL_FIELDS, *ID_FIELDS, *DETAIL_FIELDS}
_FIELDS |= {"turns", "data", "system", "category", "license", "role", "parent_id"}

LONGEST_ID = 200
_SPLIT_ID = re.compile(r"([0-9A-Za-z]{7})_0*[1-9]\d*", re.ASCII)
"""ShareGPT files split long conversations: the key of a shared page, and the place of the first message."""


def read_row(row: Any, src: str, fallback_id: str, where: str, field: str | None = None) -> Prompt | Rejected:
    """The prompt in a row of any known shape, or why there is none.

    Args:
        row: what a line of JSON, or a row of a table, holds.
        fallback_id: the prompt's id when the row has none that can be one.
        where: the place in words.
        field: the only field to look at: a text, a list of turns or messages; by default the known ones.
    """
    if isinstance(row, Broken):
        return Rejected(row.reason, where, row.detail)
    try:
        if isinstance(row, list) and row and is_message(row[0]):
            row = {"messages": row}
        if not isinstance(row, Mapping):
            raise NoPromptError(
                "not_an_object", f"is {type(row).__name__}, not an object: give it a field {SHAPES}"
            )
        row = _named(row)
        own_id = _id(row)
        said = _read_field(row, field) if field else _read(row)
        turns = tuple(turn for turn in said.turns if not is_blank(turn))
        if not turns:
            raise NoPromptError("no_user_text", "has no text from a user")
        if "conversations" in row and _is_later_piece(own_id):
            raise NoPromptError(
                "inside_conversation",
                "is a later piece of a conversation that was split",
            )
    except NoPromptError as error:
        return Rejected(error.reason, where, error.detail)
    return Prompt(
        id=own_id or fallback_id,
        turns=turns,
        source=src,
        category=_label(row.get("category")),
        license=_label(row.get("license")),
        system="" if is_blank(said.system) else said.system,
        tools=_tools(row),
    )


def _named(row: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The row with known fields under their known names, for which `Prompt` and ` question ` stand too."""
    others = {key: name for key in row if isinstance(key, str) and (name := key.strip().lower()) != key}
    known = {name: row[key] for key, name in others.items() if name in _FIELDS and name not in row}
    return {**row, **known} if known else row


def _id(row: Mapping[Any, Any]) -> str:
    """The row's own id; "" without one that is a short text, or a number."""
    for name in ID_FIELDS:
        value = row.get(name)
        if isinstance(value, float) and value.is_integer():  # what tables make of numbers with gaps
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**LONGEST_ID:
            return str(value)
        if isinstance(value, str) and len(value) <= LONGEST_ID:
            text = encodable(value).strip()
            if text.isprintable() and not is_blank(text):
                return text
    return ""


def _is_later_piece(own_id: str) -> bool:
    found = _SPLIT_ID.fullmatch(own_id)
    if found is None:
        return False
    # A key of a page is random; of one kind of character only words and numbers are made.
    return len({(c.isdigit(), c.isupper()) for c in found[1]}) > 1


def _read(row: Mapping[str, Any]) -> Said:
    empty = False
    for field in ("turns", *MESSAGE_FIELDS):
        items = listed(row.get(field))
        if items:
            return _read_turns(items, field)
        empty = empty or items is not None
    if isinstance(data := row.get("data"), list) and data:
        if is_message(data[0]):
            return read_messages(data, "data")
        if all(isinstance(text, str) for text in data):
            return Said("", tuple(map(encodable, data[::2])))  # UltraChat: user and assistant take turns
    if "role" in row and "parent_id" in row:
        return _tree_message(row)
    for field in TEXT_FIELDS:
        value = row.get(field)
        if isinstance(value, Mapping) and "text" in value:
            return Said("", tuple(_tree_turns(value)))
        if isinstance(value, str) and field == "instruction":
            return Said(_text(row.get("system")), (_instruction(value, row),))
        if isinstance(value, str | list):
            said = _read_field(row, field)
            return said if said.system else Said(_text(row.get("system")), said.turns)
    for field in PREFERENCE_FIELDS:
        if (messages := listed(row.get(field))) is not None:
            return read_messages(messages, field)
    if empty:
        return Said("", ())
    found = ", ".join(f"{field} holds {_what(row[field])}" for field in _READ if field in row)
    about = f"its {found}" if found else f"its keys are: {shown_keys(row)}"
    raise NoPromptError("no_prompt_field", f"is no prompt, {about}; eagle reads {SHAPES}")


def _what(value: Any) -> str:
    """What stands where a text or messages should, in the words of JSON."""
    if value is None:
        return "null"
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        bytes: "bytes",
        list: "a list",
        str: "text",
    }
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "an object")


def _read_field(row: Mapping[str, Any], field: str) -> Said:
    """A field that holds a text, turns as strings, or messages."""
    value = row.get(field)
    if is_null(value):
        raise NoPromptError("no_prompt_field", f"has no {one_line(field)}, its keys are: {shown_keys(row)}")
    items = listed(value)
    if items is not None and (not isinstance(value, str) or (items and is_message(items[0]))):
        return _read_turns(items, field)
    if isinstance(value, str):
        return Said("", (encodable(value),))
    if isinstance(value, Mapping) and "text" in value:
        return Said("", tuple(_tree_turns(value)))
    raise NoPromptError("not_text", f"has {type(value).__name__} as {one_line(field)}; eagle reads text only")


def _read_turns(turns: list[Any], field: str) -> Said:
    if all(isinstance(turn, str) or is_null(turn) for turn in turns):
        return Said("", tuple(encodable(turn) for turn in turns if not is_null(turn)))
    return read_messages(turns, field)


def _instruction(text: str, row: Mapping[str, Any]) -> str:
    details = next((row[key] for key in DETAIL_FIELDS if isinstance(row.get(key), str)), "")
    return encodable("\n\n".join(part for part in (text, details) if not is_blank(part)))


def _tree_message(row: Mapping[str, Any]) -> Said:
    """A message of an OASST tree that is listed flat: only one that opens a conversation stands alone."""
    opens = is_null(row["parent_id"]) or row["parent_id"] == ""
    if not opens or str(row["role"]).lower() not in USER_ROLES:
        raise NoPromptError("inside_conversation", "is a message from inside a conversation")
    return Said("", (message_text(row, "text", 1),))


def _tree_turns(node: Mapping[str, Any]) -> Iterable[str]:
    """The user's turns on the path of an OASST tree that takes the first reply each time."""
    current: Mapping[str, Any] | None = node
    while current is not None:
        text = current.get("text")
        if str(current.get("role", "prompter")).lower() in USER_ROLES:
            if not isinstance(text, str):
                raise NoPromptError("not_text", "has a message without text in its tree")
            yield encodable(text)
        replies = current.get("replies")
        current = (
            replies[0] if isinstance(replies, list) and replies and isinstance(replies[0], Mapping) else None
        )


def _tools(row: Mapping[str, Any]) -> str:
    """The functions that a row offers to the model, as JSON; "" for none, and for what is no list of them."""
    for field in TOOL_FIELDS:
        tools = [_parsed(tool) for tool in _parsed(row.get(field), list) or []]
        if tools and all(isinstance(tool, Mapping) for tool in tools):
            try:
                return encodable(json.dumps(tools, sort_keys=True, ensure_ascii=False, default=str))
            except (TypeError, ValueError, RecursionError):
                return ""
    return ""


def _parsed(value: Any, kind: type = Mapping) -> Any:
    """A value of a kind, be it written as JSON; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, kind) else None


def _text(value: Any) -> str:
    return encodable(value) if isinstance(value, str) else ""


def _label(value: Any) -> str:
    return one_line(encodable(value)) if isinstance(value, str) else ""
