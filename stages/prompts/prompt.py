"""What one row of a source comes to: a prompt, or the reason why it is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal[
    "not_an_object",
    "no_prompt_field",
    "no_user_text",
    "not_text",
    "unknown_role",
    "tool_messages",
    "malformed_messages",
    "inside_conversation",
    "not_utf8",
    "bad_json",
    "bad_csv",
    "cut_off",
]
"""Why a row is no prompt: `not_text` has pictures or other parts, `tool_messages` needs tools that are not
there, `inside_conversation` is an answer or lacks its beginning, `cut_off` is where a file ends too early.
"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What users said in one conversation, without the answers.

    Attributes:
        id: the row's own id, or `<file name>:<row number>`.
        turns: the user's turns, in order; at least one, none of them blank.
        source: what the prompt was read from, as the user wrote it.
        system: the system message that opened the conversation, "" if there was none.
        tools: JSON of the functions the model may call, as chat templates take them, "" if there are none.
    """

    id: str
    turns: tuple[str, ...]
    source: str
    category: str = ""
    license: str = ""
    system: str = ""
    tools: str = ""


@dataclass(frozen=True)
class Rejected:
    """A row that is no prompt.

    Attributes:
        where: the place in words, such as "chat.jsonl, line 3".
        detail: what is wrong there, without any of the row's text.
    """

    reason: Reason
    where: str
    detail: str

    def __str__(self) -> str:
        return f"{self.where} {self.detail}"
