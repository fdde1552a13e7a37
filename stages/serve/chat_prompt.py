"""What a chat's prompt is made of: messages, tools, and what the target's chat template is told besides."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from stages.serve.message import AssistantTurn, ChatMessage
from stages.serve.request_part import JsonObject, RequestPart, invalid
from stages.serve.tool import MAX_TOOLS, Tool

# A template is the operator's, what its variables hold is not: `' ' * indent` must stay a small matter.
MAX_VARIABLE_DEPTH = 16
MAX_VARIABLE_VALUES = 1000
MAX_VARIABLE_CHARACTERS = 65_536
MAX_VARIABLE_NUMBER = 2**20


def _modest(variables: dict[str, Any]) -> dict[str, Any]:
    left: list[tuple[Any, int]] = [(variables, 0)]
    values = characters = 0
    while left:
        value, depth = left.pop()
        values += 1
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, dict):
            left += [(each, depth + 1) for pair in value.items() for each in pair]
        elif isinstance(value, list):
            left += [(each, depth + 1) for each in value]
        elif value is not None and not -MAX_VARIABLE_NUMBER <= value <= MAX_VARIABLE_NUMBER:
            raise ValueError(f"a number is beyond {MAX_VARIABLE_NUMBER}")
        if depth > MAX_VARIABLE_DEPTH:
            raise ValueError(f"more than {MAX_VARIABLE_DEPTH} objects and lists within one another")
        if values > MAX_VARIABLE_VALUES or characters > MAX_VARIABLE_CHARACTERS:
            most = f"{MAX_VARIABLE_VALUES} values or {MAX_VARIABLE_CHARACTERS} characters"
            raise ValueError(f"more than {most} are not taken")
    return variables


class ChatPrompt(RequestPart):
    """The fields that decide a chat's prompt."""

    messages: list[ChatMessage] = Field(min_length=1)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[JsonObject, AfterValidator(_modest)] | None = None

    @property
    def begins_answer(self) -> bool:
        """Whether the prompt ends with the start of a message of the assistant's."""
        return not self.continue_final_message and self.add_generation_prompt is not False

    def refuse_prompt(self) -> None:
        """Refuses what would be ignored, and what cannot be.

        Raises:
            ApiError: there is such a thing.
        """
        for i, turn in enumerate(self.messages):
            turn.refuse_unsupported(f"messages[{i}]")
        tools = self.tools or []
        for i, tool in enumerate(tools):
            tool.refuse_unsupported(f"tools[{i}]")
        names = [tool.function.name for tool in tools]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise invalid("tools", f"tools has {twice} more than once; give each function its own name")
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            message = "add_generation_prompt begins a message and continue_final_message goes on with one"
            raise invalid("continue_final_message", f"{message}; use one of them")
        last = self.messages[-1]
        if not isinstance(last, AssistantTurn) or last.content is None or last.tool_calls:
            message = "continue_final_message needs a last message of the assistant's, with text and no calls"
            raise invalid("continue_final_message", message)
