"""The bodies that the HTTP API takes: `/v1/chat/completions` and `/v1/completions`.

A request's fields are those that change the answer. Of OpenAI's other fields some say nothing about it and
are let through; the rest are let through only where they ask for what happens anyway
(`refuse_unsupported`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from stages.serve.api_error import ApiError, shown

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_BIASES = 1024

# Fields that do not bear on the answer: names of callers, hints for caches and billing.
NO_EFFECT = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
}
# Fields of OpenAI's API and of vLLM's that are not supported, with the values that ask for nothing special.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "store": (False,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
TEXT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
}


class _Input(BaseModel):
    """A part of a request: types as they are, no NaN, unknown fields kept for `refuse_unsupported`."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="allow")


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not valid Unicode, a surrogate stands alone") from None
    return text


UnicodeText = Annotated[str, AfterValidator(_encodable)]


class TextPart(_Input):
    """One part of a message in parts; only text is taken."""

    type: Literal["text"]
    text: UnicodeText


def _content_tag(content: Any) -> str:
    return "<parts>" if isinstance(content, list) else "<text>"


def _stop_tag(stop: Any) -> str:
    return "<list>" if isinstance(stop, list) else "<text>"


def _prompt_tag(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return "<text>"
    kinds = {int: "<ids>", list: "<lists>"}
    return kinds.get(type(prompt[0]), "<texts>") if prompt else "<texts>"


Content = Annotated[
    Annotated[UnicodeText, Tag("<text>")] | Annotated[list[TextPart], Tag("<parts>")],
    Discriminator(_content_tag),
]
StopString = Annotated[UnicodeText, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[Annotated[list[StopString], Field(max_length=MAX_STOPS)], Tag("<list>")],
    Discriminator(_stop_tag),
]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[UnicodeText, Tag("<text>")]
    | Annotated[Annotated[list[UnicodeText], Field(min_length=1)], Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], Tag("<lists>")],
    Discriminator(_prompt_tag),
]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class ChatMessage(_Input):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def for_template(self) -> dict[str, str]:
        """The message as chat templates take it: parts joined by line breaks, a developer as the system."""
        content = self.content
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": content if isinstance(content, str) else "\n".join(part.text for part in content),
        }


class StreamOptions(_Input):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class JsonSchema(_Input):
    """The schema that an answer must follow. It does so whether `strict` or not."""

    name: UnicodeText | None = None
    description: UnicodeText | None = None
    strict: bool | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Input):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class AnswerRequest(_Input):
    """What both kinds of request have in common. None is the same as leaving a field out."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: dict[BiasedId, Bias] | None = Field(default=None, max_length=MAX_BIASES)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def token_limit(self) -> int | None:
        """The cap on the answer's tokens."""
        return self.max_tokens

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """The schema that the answer must follow; None for free text."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "object"}
        assert form.json_schema is not None, "see refuse_unsupported"
        return form.json_schema.schema_

    def refuse_unsupported(self) -> None:
        """Refuses what would otherwise be ignored.

        Raises:
            ApiError: a field is unknown, or asks for something that this server does not do.
        """
        self._refuse_extra()
        if self.stream_options is not None:
            _refuse_extra_of(self.stream_options, "stream_options.")
            if not self.stream:
                raise _invalid("stream_options", "stream_options needs stream to be true")
        form = self.response_format
        if form is not None:
            _refuse_extra_of(form, "response_format.")
            if (form.type == "json_schema") != (form.json_schema is not None):
                message = "response_format.json_schema goes with type = json_schema; give both or neither"
                raise _invalid("response_format", message)
            if form.json_schema is not None:
                _refuse_extra_of(form.json_schema, "response_format.json_schema.")
            if form.type != "text" and self.ignore_eos:
                raise _invalid("ignore_eos", "ignore_eos cannot go with a response_format; leave one out")

    def _refuse_extra(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if name not in NO_EFFECT:
                _refuse(name, value, self.neutral.get(name))


class ChatRequest(AnswerRequest):
    """Body of `POST /v1/chat/completions`."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL | CHAT_NEUTRAL

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @property
    def token_limit(self) -> int | None:
        """The cap on the answer's tokens, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for i, turn in enumerate(self.messages):
            _refuse_extra_of(turn, f"messages[{i}].")
            if not isinstance(turn.content, str):
                for j, part in enumerate(turn.content):
                    _refuse_extra_of(part, f"messages[{i}].content[{j}].")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.token_limit:
            message = (
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; "
                "they mean the same, so give one"
            )
            raise _invalid("max_tokens", message)


class CompletionRequest(AnswerRequest):
    """Body of `POST /v1/completions`: text or token ids to go on from, without a chat template."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL | TEXT_NEUTRAL

    prompt: Prompt

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One for each that is to be answered."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else prompt


def _refuse_extra_of(part: _Input, prefix: str) -> None:
    for name, value in (part.model_extra or {}).items():
        _refuse(prefix + name, value, ([], {}, False), hint="leave it out")


def _refuse(param: str, value: Any, neutral: tuple[Any, ...] | None, hint: str | None = None) -> None:
    if neutral is None:
        raise ApiError(400, f"{param} is no parameter; leave it out", param=param, code="unknown_parameter")
    if value is None or any(_same(value, one) for one in neutral):
        return
    allowed = " or ".join(shown(one) for one in neutral)
    hint = hint or (f"leave it out or use {allowed}" if allowed else "leave it out")
    message = f"{param} = {shown(value)} is not supported; {hint}"
    raise ApiError(400, message, param=param, code="unsupported_parameter")


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def _same(value: Any, other: Any) -> bool:
    """Equality that tells true from 1 and false from 0, as JSON does."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
