"""The bodies of the HTTP API: what `/v1/chat/completions` and `/v1/models` take and give.

A request's fields are those that change the answer. Of OpenAI's other fields some say nothing about it and
are let through; the rest are let through only where they ask for what happens anyway
(`refuse_unsupported`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from stages.serve.answer import FinishReason
from stages.serve.api_error import ApiError, shown

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024

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
    "audio": (),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
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


class ChatRequest(_Input):
    """Body of `POST /v1/chat/completions`. None is the same as leaving a field out."""

    messages: list[ChatMessage] = Field(min_length=1)
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Stop | None = None
    ignore_eos: bool | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def token_limit(self) -> int | None:
        """The cap on the answer's tokens, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def refuse_unsupported(self) -> None:
        """Refuses what would otherwise be ignored.

        Raises:
            ApiError: a field is unknown, or asks for something that this server does not do.
        """
        _refuse_extra(self, "")
        for i, turn in enumerate(self.messages):
            _refuse_extra(turn, f"messages[{i}].")
            if not isinstance(turn.content, str):
                for j, part in enumerate(turn.content):
                    _refuse_extra(part, f"messages[{i}].content[{j}].")
        if self.stream_options is not None:
            _refuse_extra(self.stream_options, "stream_options.")
            if not self.stream:
                message = "stream_options needs stream to be true"
                raise ApiError(400, message, param="stream_options", code="invalid_value")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.token_limit:
            message = (
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; "
                "they mean the same, so give one"
            )
            raise ApiError(400, message, param="max_tokens", code="invalid_value")


def _refuse_extra(part: _Input, prefix: str) -> None:
    top = isinstance(part, ChatRequest)
    for name, value in (part.model_extra or {}).items():
        if top and name in NO_EFFECT:
            continue
        neutral = NEUTRAL.get(name) if top else ([], {})
        param = prefix + name
        if neutral is None:
            raise ApiError(
                400, f"{param} is no parameter; leave it out", param=param, code="unknown_parameter"
            )
        if value is None or any(_same(value, one) for one in neutral):
            continue
        allowed = " or ".join(shown(one) for one in neutral) if top and neutral else ""
        hint = f"leave it out or use {allowed}" if allowed else "leave it out"
        message = f"{param} = {shown(value)} is not supported; {hint}"
        raise ApiError(400, message, param=param, code="unsupported_parameter")


def _same(value: Any, other: Any) -> bool:
    """Equality that tells true from 1 and false from 0, as JSON does."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


class Usage(BaseModel):
    """Tokens of a request. The token that ended the answer counts as one of it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculationStats(BaseModel):
    """How an answer was decoded; not part of OpenAI's API, whose clients skip it.

    steps: forward passes of the target after the prompt's own.
    drafted, accepted: draft tokens that those verified, and those of them that entered the answer.
    accepted_per_step, tokens_per_step: averages over the steps; None without any.
    seed: what makes the same request give the same answer again.
    """

    steps: int
    drafted: int
    accepted: int
    accepted_per_step: float | None
    tokens_per_step: float | None
    seed: int


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    """The one answer of a completion."""

    index: int = 0
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """Body of an answer given at once."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    eagle: SpeculationStats


def _is_none(value: Any) -> bool:
    return value is None


class Delta(BaseModel):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=_is_none)
    content: str | None = Field(default=None, exclude_if=_is_none)


class ChunkChoice(BaseModel):
    """The part of the one answer that a chunk carries."""

    index: int = 0
    delta: Delta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a streamed answer. The last before the usage carries finish reason and statistics."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = Field(default=None, exclude_if=_is_none)
    eagle: SpeculationStats | None = Field(default=None, exclude_if=_is_none)


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "eagle"
    max_model_len: int


class ModelList(BaseModel):
    """Body of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """Body of `GET /health`."""

    status: Literal["ok", "stopping"]
    running: int
    waiting: int
