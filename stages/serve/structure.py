"""The form that an answer must have: JSON of a schema, a pattern, or one of a few texts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from stages.serve.request_part import Encodable, JsonObject, RequestPart, UnicodeText, invalid, refuse

MAX_PATTERN_CHARACTERS = 4096
MAX_OPTIONS = 1024
MAX_OPTION_CHARACTERS = 1024
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Structure:
    """What an answer must be; one of the three is given.

    schema: JSON of this schema.
    pattern: text that this regular expression matches whole.
    options: one of these texts.
    param: the field of the request that says so.
    """

    param: str
    schema: dict[str, Any] | None = None
    pattern: str | None = None
    options: tuple[str, ...] = ()


class JsonSchema(RequestPart):
    """The schema that an answer must follow. It does so whether `strict` or not."""

    name: UnicodeText | None = None
    description: UnicodeText | None = None
    strict: bool | None = None
    schema_: JsonObject = Field(alias="schema")


class ResponseFormat(RequestPart):
    """The form of the answer, as OpenAI's API says it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def structure(self) -> Structure | None:
        """None for free text."""
        if self.type == "text":
            return None
        if self.json_schema is None:
            return Structure("response_format", ANY_OBJECT)
        return Structure("response_format", self.json_schema.schema_)

    def refuse_unsupported(self) -> None:
        """Refuses what would be ignored, and what cannot be. Raises ApiError."""
        self.refuse_extra("response_format.")
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "response_format.json_schema goes with type = json_schema; give both or neither"
            raise invalid("response_format", message)
        if self.json_schema is not None:
            self.json_schema.refuse_extra("response_format.json_schema.")


def _parsed(schema: Any) -> Any:
    """A schema may be given as its text."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        raise ValueError("not the text of a JSON object") from None


Pattern = Annotated[str, Field(min_length=1, max_length=MAX_PATTERN_CHARACTERS), Encodable]
Option = Annotated[str, Field(min_length=1, max_length=MAX_OPTION_CHARACTERS), Encodable]
Options = Annotated[list[Option], Field(min_length=1, max_length=MAX_OPTIONS)]


class StructuredOutputs(RequestPart):
    """The form of the answer, as vLLM's API says it: one of the fields is given."""

    json_: Annotated[JsonObject, BeforeValidator(_parsed)] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: Pattern | None = None
    choice: Options | None = None

    @property
    def structure(self) -> Structure:
        """What it stands for."""
        param = "structured_outputs"
        if self.regex is not None:
            return Structure(param, pattern=self.regex)
        if self.choice is not None:
            return Structure(param, options=tuple(self.choice))
        return Structure(param, ANY_OBJECT if self.json_ is None else self.json_)

    def refuse_unsupported(self) -> None:
        """Refuses what would be ignored, and what cannot be. Raises ApiError."""
        hint = "use json, json_object, regex or choice"
        for name, value in (self.model_extra or {}).items():
            refuse(f"structured_outputs.{name}", value, (False,), hint=hint)
        given = (self.json_, self.json_object or None, self.regex, self.choice)
        if len([each for each in given if each is not None]) != 1:
            message = "structured_outputs takes one of json, json_object, regex and choice; give just one"
            raise invalid("structured_outputs", message)
