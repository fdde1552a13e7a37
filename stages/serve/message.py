"""The messages of a chat: of people, of the assistant with the calls that it made, and what these gave."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from stages.serve.request_part import Encodable, RequestPart, UnicodeText, all_encodable, invalid


class TextPart(RequestPart):
    """One part of a message in parts; only text is taken."""

    type: Literal["text"]
    text: UnicodeText


def _content_tag(content: Any) -> str:
    return "<parts>" if isinstance(content, list) else "<text>"


Content = Annotated[
    Annotated[UnicodeText, Tag("<text>")] | Annotated[list[TextPart], Tag("<parts>")],
    Discriminator(_content_tag),
]


def _arguments_object(text: str) -> str:
    """A call's arguments are the text of a JSON object; none at all is an empty one."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("not the text of a JSON object")
    all_encodable(found)
    return text or "{}"


class CalledFunction(RequestPart):
    """The function of a call, and its arguments as JSON text."""

    name: Annotated[str, Field(min_length=1), Encodable]
    arguments: Annotated[UnicodeText, AfterValidator(_arguments_object)]


class ToolCall(RequestPart):
    """A call that the assistant has made."""

    id: UnicodeText
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates take it: the arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class _Message(RequestPart):
    def refuse_unsupported(self, param: str) -> None:
        """Refuses what would be ignored; `param` is the message's path. Raises ApiError."""
        self.refuse_extra(f"{param}.")
        content = getattr(self, "content", None)
        if isinstance(content, list):
            for j, part in enumerate(content):
                part.refuse_extra(f"{param}.content[{j}].")


class UserMessage(_Message):
    """What a user says, or whoever sets the rules."""

    role: Literal["system", "developer", "user"]
    content: Content

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it: parts joined by line breaks, a developer as the system."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": _joined(self.content)}


class AssistantTurn(_Message):
    """What the assistant has said, and which tools it has called."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        message: dict[str, Any] = {"role": "assistant", "content": _joined(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message

    def refuse_unsupported(self, param: str) -> None:
        super().refuse_unsupported(param)
        if self.content is None and not self.tool_calls:
            raise invalid(f"{param}.content", f"{param} says nothing and calls nothing; give it a content")
        for j, call in enumerate(self.tool_calls or ()):
            call.refuse_extra(f"{param}.tool_calls[{j}].")
            call.function.refuse_extra(f"{param}.tool_calls[{j}].function.")


class ToolResult(_Message):
    """What a call has given. `name` is that of the function, for templates that show it."""

    role: Literal["tool"]
    content: Content
    tool_call_id: UnicodeText
    name: UnicodeText | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it, without the name, which `with_names` adds."""
        return {"role": "tool", "content": _joined(self.content), "tool_call_id": self.tool_call_id}


def _joined(content: str | list[TextPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _role_tag(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else getattr(message, "role", None)
    return {"assistant": "<assistant>", "tool": "<tool>"}.get(str(role), "<user>")


ChatMessage = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantTurn, Tag("<assistant>")]
    | Annotated[ToolResult, Tag("<tool>")],
    Discriminator(_role_tag),
]


def for_template(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates take them; results bear the name of the function that gave them.

    Raises:
        ApiError: a result belongs to no call before it.
    """
    names: dict[str, str] = {}
    rendered = []
    for i, message in enumerate(messages):
        one = message.for_template()
        if isinstance(message, AssistantTurn):
            names |= {call.id: call.function.name for call in message.tool_calls or ()}
        elif isinstance(message, ToolResult):
            if message.tool_call_id not in names:
                param = f"messages[{i}].tool_call_id"
                text = f"{param} = {message.tool_call_id!a} is no call of a message before it"
                raise invalid(param, text)
            one["name"] = message.name or names[message.tool_call_id]
        rendered.append(one)
    return rendered
