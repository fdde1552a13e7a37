"""The bodies that the HTTP API gives: OpenAI's, with token ids as vLLM has them and how they were decoded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from stages.serve.answer import FinishReason
from stages.serve.logprobs import ChatLogprobs, TextLogprobs


def _is_none(value: Any) -> bool:
    return value is None


Ids = Annotated[list[int] | None, Field(exclude_if=_is_none)]
"""Token ids, left out unless asked for."""


class SpeculationStats(BaseModel):
    """How a request was decoded; not part of OpenAI's API, whose clients keep it as an extra field.

    steps: forward passes of the target after the prompt's own.
    drafted, accepted: draft tokens that those verified, and those of them that entered the answer.
    accepted_per_position: how often the first, second, ... drafted token of a step was accepted.
    accepted_per_step, tokens_per_step: averages over the steps; None without any.
    """

    steps: int
    drafted: int
    accepted: int
    accepted_per_position: list[int]
    accepted_per_step: float | None
    tokens_per_step: float | None


class StepSpeculation(BaseModel):
    """How the tokens of an event came about, for those who show it; only in streams, and only if asked for.

    accepted: so many of the event's tokens, the first ones, were drafted; the target drew the others itself.
    texts: what each token has added to the text, empty where a character is not complete yet. A last one
        without a token is what was still held when the answer ended.
    seconds: from the request to these tokens, by the server's clock.
    """

    accepted: int
    texts: list[str]
    seconds: float


Steps = Annotated[StepSpeculation | None, Field(exclude_if=_is_none)]


class PromptTokensDetails(BaseModel):
    """Of the prompts: tokens that were kept from earlier requests, and not read again."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request, of all its answers. The token that ended an answer counts as one of it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    speculation: SpeculationStats


class CalledFunction(BaseModel):
    """The function of a call and its arguments, JSON text that the model wrote."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The answer; `content` is None where it consists of calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(exclude_if=_is_none)] = None


class ChatChoice(BaseModel):
    """One answer to a chat. `stop_reason` is the stop string or token that ended it, None for others."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: Ids = None


class ChatCompletion(BaseModel):
    """A chat's answers, given at once. The same request with `seed` has the same answers again."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    seed: int
    prompt_token_ids: Ids = None


class FunctionDelta(BaseModel):
    """What a chunk adds to the function of a call: its name, then pieces of its arguments."""

    name: str | None = Field(default=None, exclude_if=_is_none)
    arguments: str


class ToolCallDelta(BaseModel):
    """What a chunk adds to the call at `index`; the first has its id."""

    index: int
    id: str | None = Field(default=None, exclude_if=_is_none)
    type: Literal["function"] | None = Field(default=None, exclude_if=_is_none)
    function: FunctionDelta


class Delta(BaseModel):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=_is_none)
    content: str | None = Field(default=None, exclude_if=_is_none)
    tool_calls: Annotated[list[ToolCallDelta] | None, Field(exclude_if=_is_none)] = None


class ChunkChoice(BaseModel):
    """The part of one answer that a chunk carries."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = Field(default=None, exclude_if=_is_none)
    token_ids: Ids = None
    speculation: Steps = None


class ChatCompletionChunk(BaseModel):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = Field(default=None, exclude_if=_is_none)
    seed: int
    prompt_token_ids: Ids = None


class TextChoice(BaseModel):
    """One answer to a prompt, or in a stream the part of it that an event carries."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: Ids = None
    prompt_token_ids: Ids = None
    speculation: Steps = None


class TextCompletion(BaseModel):
    """The answers to one or several prompts, given at once or as one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = Field(default=None, exclude_if=_is_none)
    seed: int


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


class Version(BaseModel):
    """Body of `GET /version`."""

    version: str
