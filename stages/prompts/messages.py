"""Lists of messages, in the forms that chat data sets have them, and what users say in them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.prompts.prompt import Reason
from stages.prompts.remnants import is_page_note, without_buttons
from stages.prompts.text import encodable, one_line

ROLE_FIELDS = ("role", "from")
TEXT_FIELDS = ("content", "value", "text")
USER_ROLES = frozenset({"user", "human", "prompter"})
ANSWER_ROLES = frozenset({"assistant", "gpt", "chatgpt", "bot", "model", "ai", "bard", "bing", "chatbot"})
SYSTEM_ROLES = frozenset({"system", "developer"})
TOOL_ROLES = frozenset(
    {"tool", "function", "function_call", "function_response", "observation", "ipython", "tool_call"}
)
_AROUND_ROLES = " \t\r\n:<>|#*[]"
_CALLS = ("tool_calls", "function_call")
_OBJECTS = re.compile(r"\s*\[\s*\{")
_LONGEST_LITERAL = 1_000_000
_SHOWN_KEYS = 10


class NoPromptError(Exception):
    """A row is no prompt: the reason that it is counted under, and what is wrong with it."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Said:
    """The system message, "" if there is none, and what users say."""

    system: str
    turns: tuple[str, ...]


def is_null(value: Any) -> bool:
    """Whether a value stands for nothing: null, or the NaN that tables have in its place."""
    return value is None or (isinstance(value, float) and value != value)


def is_message(value: Any) -> bool:
    """Whether something is a message of a conversation, and no row that is a message by itself."""
    return (
        isinstance(value, Mapping)
        and any(name in value for name in ROLE_FIELDS)
        and any(name in value for name in TEXT_FIELDS)
        and "parent_id" not in value
    )


def listed(value: Any) -> list[Any] | None:
    """A list of objects, also written as text or as an object of columns; None for anything else."""
    if isinstance(value, list):
        return value
    if isinstance(value, Mapping):
        return _from_columns(value)
    if isinstance(value, str) and _OBJECTS.match(value):
        return _from_text(value)
    return None


def read_messages(messages: Sequence[Any], field: str) -> Said:
    """What users say in a list of messages, and the system message that opens it.

    Raises:
        NoPromptError: it is none, it has roles or contents that eagle does not know, or needs tools.
    """
    system, turns = "", []
    for place, message in enumerate(messages, start=1):
        if is_null(message):
            continue
        if not isinstance(message, Mapping):
            raise NoPromptError(
                "malformed_messages",
                f"{field}: message {place} is {type(message).__name__}, not role and content",
            )
        role = next((message[key] for key in ROLE_FIELDS if not is_null(message.get(key))), None)
        if not isinstance(role, str):
            raise NoPromptError(
                "malformed_messages",
                f"{field}: message {place} has no role or from, its keys are: {shown_keys(message)}",
            )
        kind = role.strip(_AROUND_ROLES).lower()
        if kind in USER_ROLES:
            turns.append(message_text(message, field, place))
        elif kind in SYSTEM_ROLES:
            # One in the middle was meant for the answers that follow it, which are not taken.
            system = system or ("" if turns else message_text(message, field, place))
        elif kind in TOOL_ROLES or any(message.get(key) for key in _CALLS):
            raise NoPromptError("tool_messages", f"{field}: message {place} is a tool's")
        elif kind not in ANSWER_ROLES:
            raise NoPromptError(
                "unknown_role", f"{field}: message {place} has the unknown role {one_line(role, 40)!r}"
            )
    return Said("" if is_page_note(system) else system, tuple(turns))


def message_text(message: Mapping[str, Any], field: str, place: int) -> str:
    """The text of a message, of a list of parts too if all of them are text.

    Raises:
        NoPromptError: there is something else in it.
    """
    name = next((key for key in TEXT_FIELDS if not is_null(message.get(key))), None)
    content = "" if name is None else message[name]
    if isinstance(content, str):
        return encodable(without_buttons(content) if name == "value" else content)
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return encodable("\n".join(texts))
    raise NoPromptError(
        "not_text", f"{field}: the content of message {place} is not text alone; eagle reads text only"
    )


def shown_keys(row: Mapping[Any, Any]) -> str:
    """The names of fields for a message of one line."""
    names = [one_line(key, 40) for _, key in zip(range(_SHOWN_KEYS), row, strict=False)]
    more = [f"and {len(row) - _SHOWN_KEYS:,} more"] if len(row) > _SHOWN_KEYS else []
    return ", ".join([*names, *more]) or "none"


def _from_columns(columns: Mapping[str, Any]) -> list[Any] | None:
    """Messages of `{"role": [...], "content": [...]}`, as some libraries store lists of objects."""
    if not is_message(columns):
        return None
    lists = {name: column for name, column in columns.items() if isinstance(column, list)}
    lengths = {len(lists.get(name, ())) for name in (*ROLE_FIELDS, *TEXT_FIELDS) if name in columns}
    if len(lengths) != 1 or len(lists) < 2:
        return None
    [length] = lengths
    same = {name: column for name, column in lists.items() if len(column) == length}
    return [{name: column[i] for name, column in same.items()} for i in range(length)]


def _from_text(text: str) -> list[Any] | None:
    """Objects in JSON, or as Python and numpy print them, which is what tables as text are full of."""
    for parse in (json.loads, _literal):
        try:
            parsed = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return parsed if isinstance(parsed, list) else None
    return None


def _literal(text: str) -> Any:
    if len(text) > _LONGEST_LITERAL:
        raise ValueError("too long")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backslashes in texts
        # numpy puts a newline where a list has a comma; those in texts are escaped.
        return ast.literal_eval(re.sub(r"\}\s*\n\s*\{", "}, {", text.strip()))
