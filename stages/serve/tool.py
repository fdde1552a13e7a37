"""The tools of a request: functions that the model may call, and whether it may, or must."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from stages.serve.request_part import JsonObject, RequestPart, UnicodeText

MAX_TOOLS = 128
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(RequestPart):
    """A function. `strict` makes the arguments follow the schema even where a call is the model's choice."""

    name: FunctionName
    description: UnicodeText | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """JSON schema of the arguments, always an object's."""
        return NO_PARAMETERS if self.parameters is None else {"type": "object", **self.parameters}


class Tool(RequestPart):
    """A tool; all are functions."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or NO_PARAMETERS,
        }
        return {"type": "function", "function": function}

    def refuse_unsupported(self, param: str) -> None:
        """Refuses what would be ignored; `param` is the tool's path. Raises ApiError."""
        self.refuse_extra(f"{param}.")
        self.function.refuse_extra(f"{param}.function.")


class NamedFunction(RequestPart):
    """The name in a `tool_choice`."""

    name: FunctionName


class NamedTool(RequestPart):
    """A `tool_choice` of one function, which must be called."""

    type: Literal["function"]
    function: NamedFunction


def _choice_tag(choice: Any) -> str:
    return "<word>" if isinstance(choice, str) else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[NamedTool, Tag("<named>")],
    Discriminator(_choice_tag),
]
