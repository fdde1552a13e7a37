"""The shapes that rows of chat data sets have, and how to take the users' turns from each.

Only what users wrote is taken. Answers that a source carries were written by other models or people; they are
neither the target's words nor, often, free to train on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stages.prompts.prompt import Prompt, Reason, Rejected

MESSAGE_FIELDS = ("messages", "conversations", "conversation")
TEXT_FIELDS = ("prompt", "question", "instruction", "text", "query")
PREFERENCE_FIELDS = ("chosen",)
SHAPES = (
    "turns, messages, conversations, conversation, data, prompt, question, instruction (+ input or context), "
    "text, query or chosen"
)
TOOL_FIELDS = ("tools", "functions")
_DETAIL_FIELDS = ("input", "context")  # what Alpaca and Dolly put beside an instruction

USER_ROLES = frozenset({"user", "human", "prompter"})
ANSWER_ROLES = frozenset({"assistant", "gpt", "chatgpt", "bot", "model", "ai", "bard", "bing", "chatbot"})
SYSTEM_ROLES = frozenset({"system", "developer"})
TOOL_ROLES = frozenset(
    {"tool", "function", "function_call", "function_response", "observation", "ipython", "tool_call"}
)


class _NoPromptError(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class _Said:
    system: str
    turns: tuple[str, ...]


def read_row(row: Any, src: str, fallback_id: str, where: str, field: str | None = None) -> Prompt | Rejected:
    """The prompt in a row of any known shape, or why there is none.

    Args:
        row: what a line of JSON, or a row of a table, holds.
        fallback_id: the prompt's id when the row has none.
        where: the place in words.
        field: the only field to look at: a text, a list of turns or messages; by default the known ones.
    """
    try:
        if not isinstance(row, Mapping):
            raise _NoPromptError(
                "not_an_object", f"is {type(row).__name__}, not an object: give it a field {SHAPES}"
            )
        said = _read_field(row, field) if field else _read(row)
        turns = tuple(turn for turn in said.turns if turn.strip())
        if not turns:
            raise _NoPromptError("no_user_text", "has no text from a user")
    except _NoPromptError as error:
        return Rejected(error.reason, where, error.detail)
    own_id = next(
        (row[key] for key in ("id", "conversation_id", "message_tree_id", "message_id") if key in row), ""
    )
    named = isinstance(own_id, str | int) and not isinstance(own_id, bool) and own_id != ""
    return Prompt(
        id=encodable(str(own_id)) if named else fallback_id,
        turns=turns,
        source=src,
        category=_label(row.get("category")),
        license=_label(row.get("license")),
        system=said.system,
        tools=_tools(row),
    )


def _read(row: Mapping[str, Any]) -> _Said:
    if isinstance(row.get("turns"), list):
        return _turns(row["turns"], "turns")
    for field in MESSAGE_FIELDS:
        if (messages := _listed(row.get(field))) is not None:
            return _messages(messages, field)
    if isinstance(data := row.get("data"), list) and data and all(isinstance(text, str) for text in data):
        return _Said("", tuple(map(encodable, data[::2])))  # UltraChat: user and assistant take turns
    if "role" in row and "parent_id" in row:
        return _tree_message(row)
    for field in TEXT_FIELDS:
        value = row.get(field)
        if isinstance(value, Mapping) and "text" in value:
            return _Said("", tuple(_tree_turns(value)))
        if isinstance(value, str) and field == "instruction":
            return _Said(_label(row.get("system")), (_instruction(value, row),))
        if isinstance(value, str | list):
            said = _read_field(row, field)
            return said if said.system else _Said(_label(row.get("system")), said.turns)
    for field in PREFERENCE_FIELDS:
        if (messages := _listed(row.get(field))) is not None:
            return _messages(messages, field)
    keys = ", ".join(map(str, row)) or "none"
    raise _NoPromptError("no_prompt_field", f"is no prompt, its keys are: {keys}; eagle reads {SHAPES}")


def _read_field(row: Mapping[str, Any], field: str) -> _Said:
    """A field that holds a text, turns as strings, or messages."""
    value = row.get(field)
    if value is None:
        keys = ", ".join(map(str, row)) or "none"
        raise _NoPromptError("no_prompt_field", f"has no {field}, its keys are: {keys}")
    if (listed := _listed(value)) is not None:
        return _turns(listed, field)
    if isinstance(value, str):
        return _Said("", (encodable(value),))
    if isinstance(value, Mapping) and "text" in value:
        return _Said("", tuple(_tree_turns(value)))
    raise _NoPromptError("not_text", f"has {type(value).__name__} as {field}; eagle reads text only")


def _listed(value: Any) -> list[Any] | None:
    """A list, also one that a table column holds as JSON text; None for anything else."""
    if isinstance(value, list):
        return value
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return None
        return parsed if isinstance(parsed, list) else None
    return None


def _turns(turns: list[Any], field: str) -> _Said:
    if all(isinstance(turn, str) or turn is None for turn in turns):
        return _Said("", tuple(encodable(turn) for turn in turns if turn is not None))
    return _messages(turns, field)


def _messages(messages: list[Any], field: str) -> _Said:
    system, turns = "", []
    for place, message in enumerate(messages, start=1):
        if message is None:
            continue
        if not isinstance(message, Mapping):
            raise _NoPromptError(
                "malformed_messages",
                f"{field}: message {place} is {type(message).__name__}, not role and content",
            )
        role = next((message[key] for key in ("role", "from") if message.get(key) is not None), None)
        if not isinstance(role, str):
            keys = ", ".join(map(str, message)) or "none"
            raise _NoPromptError(
                "malformed_messages", f"{field}: message {place} has no role or from, its keys are: {keys}"
            )
        kind = role.strip().lower()
        if kind in USER_ROLES:
            turns.append(_text(message, field, place))
        elif kind in SYSTEM_ROLES:
            # One in the middle was meant for the answers that follow it, which are not taken.
            system = system or ("" if turns else _text(message, field, place))
        elif kind in TOOL_ROLES or message.get("tool_calls"):
            raise _NoPromptError("tool_messages", f"{field}: message {place} is a tool's")
        elif kind not in ANSWER_ROLES:
            raise _NoPromptError(
                "unknown_role", f"{field}: message {place} has the unknown role {role[:40]!r}"
            )
    return _Said(system, tuple(turns))


def _text(message: Mapping[str, Any], field: str, place: int) -> str:
    """The text of a message, of a list of parts too if all of them are text."""
    content = next((message[key] for key in ("content", "value", "text") if message.get(key) is not None), "")
    if isinstance(content, str):
        return encodable(content)
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return encodable("\n".join(texts))
    raise _NoPromptError(
        "not_text", f"{field}: the content of message {place} is not text alone; eagle reads text only"
    )


def _instruction(text: str, row: Mapping[str, Any]) -> str:
    details = next((row[key] for key in _DETAIL_FIELDS if isinstance(row.get(key), str)), "")
    return encodable(f"{text}\n\n{details}" if details.strip() else text)


def _tree_message(row: Mapping[str, Any]) -> _Said:
    """A message of an OASST tree that is listed flat: only one that opens a conversation stands alone."""
    if str(row["role"]).lower() not in USER_ROLES or row["parent_id"]:
        raise _NoPromptError("not_a_prompt", "is a message from inside a conversation")
    return _Said("", (_text(row, "text", 1),))


def _tree_turns(node: Mapping[str, Any]) -> Iterable[str]:
    """The user's turns on the path of an OASST tree that takes the first reply each time."""
    current: Mapping[str, Any] | None = node
    while current is not None:
        text = current.get("text")
        if str(current.get("role", "prompter")).lower() in USER_ROLES:
            if not isinstance(text, str):
                raise _NoPromptError("not_text", "has a message without text in its tree")
            yield encodable(text)
        replies = current.get("replies")
        current = (
            replies[0] if isinstance(replies, list) and replies and isinstance(replies[0], Mapping) else None
        )


def _tools(row: Mapping[str, Any]) -> str:
    """The functions that a row offers to the model, as JSON; "" for none, and for what is no list of them."""
    for field in TOOL_FIELDS:
        listed = _listed(row.get(field))
        if listed and all(isinstance(tool, Mapping) for tool in listed):
            return json.dumps(listed, sort_keys=True)
    return ""


def _label(value: Any) -> str:
    return encodable(value) if isinstance(value, str) else ""


def encodable(text: str) -> str:
    """`text` with lone surrogates (half of an emoji cut in two by a JSON escape) replaced: UTF-8 has none."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
