"""The bodies that the HTTP API takes: `/v1/chat/completions` and `/v1/completions`.

A request's fields are those that change the answer. Of OpenAI's other fields some say nothing about it and
are let through; the rest are let through only where they ask for what happens anyway
(`refuse_unsupported`).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from stages.serve.chat_prompt import ChatPrompt
from stages.serve.request_part import Encodable, RequestPart, UnicodeText, Whole, invalid, refuse
from stages.serve.structure import ResponseFormat, Structure, StructuredOutputs
from stages.serve.tool import NamedTool, Tool, ToolChoice

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128
MAX_BIASES = 1024
MAX_WORDS = 1024
MAX_WORD_CHARACTERS = 256
MAX_LOGPROBS = 20

# Fields that do not bear on the answer: names of callers, hints for caches and billing.
NO_EFFECT = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "session_id",
    "user",
}
# Fields of OpenAI's API and of vLLM's that are not supported, with the values that ask for nothing special.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logprob_token_ids": (),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "request_id": (),
    "spaces_between_special_tokens": (True, False),
    "store": (False,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "return_prompt_text": (False,),
    "verbosity": (),
    "web_search_options": (),
}
TEXT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "prompt_embeds": (),
    "suffix": ("",),
}


UsageShown = Literal["never", "last", "always"]


def _stop_tag(stop: Any) -> str:
    return "<list>" if isinstance(stop, list) else "<text>"


def _prompt_tag(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return "<text>"
    kinds = {int: "<ids>", float: "<ids>", list: "<lists>"}
    return kinds.get(type(prompt[0]), "<texts>") if prompt else "<texts>"


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS), Encodable]
Stop = Annotated[
    Annotated[StopString, Tag("<text>")]
    | Annotated[Annotated[list[StopString], Field(max_length=MAX_STOPS)], Tag("<list>")],
    Discriminator(_stop_tag),
]
TokenId = Annotated[int, Field(ge=0), Whole]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    Annotated[UnicodeText, Tag("<text>")]
    | Annotated[Annotated[list[UnicodeText], Field(min_length=1)], Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[Annotated[list[TokenIds], Field(min_length=1)], Tag("<lists>")],
    Discriminator(_prompt_tag),
]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasedId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Biases = Annotated[
    dict[BiasedId, Bias],
    Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
]


BadWord = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARACTERS), Encodable]


class StreamOptions(RequestPart):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AnswerRequest(RequestPart):
    """What both kinds of request have in common. None is the same as leaving a field out."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), Whole] | None = None
    max_tokens: Annotated[int, Field(ge=1), Whole] | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1), Whole] | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: Biases | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64), Whole] | None = None
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Field(ge=0), Whole] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_WORDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), Whole] | None = None
    truncation_side: Literal["left", "right"] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    speculative: bool | None = None
    return_speculation: bool | None = None

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
    def usage_shown(self) -> UsageShown:
        """Which events of a stream tell of the tokens so far."""
        options = self.stream_options
        if options is None or not options.include_usage:
            return "never"
        return "always" if options.continuous_usage_stats else "last"

    @property
    @abstractmethod
    def told_tokens(self) -> int | None:
        """How many of the most probable tokens are told with each of the answer; None for nothing."""

    @property
    def structure(self) -> Structure | None:
        """What the answer must be; None for free text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.structure
        return None if self.response_format is None else self.response_format.structure

    @property
    def constrained(self) -> bool:
        """Whether a grammar rules out some of the answers."""
        return self.structure is not None

    @property
    def rules(self) -> list[str]:
        """Fields that rule out tokens, and would not leave a grammar enough of them."""
        names = ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words")
        return [name for name in names if getattr(self, name)]

    def refuse_unsupported(self) -> None:
        """Refuses what would otherwise be ignored.

        Raises:
            ApiError: a field is unknown, or asks for something that this server does not do.
        """
        self._refuse_extra()
        if self.return_speculation and not self.stream:
            message = "return_speculation needs stream to be true; usage.speculation tells of whole answers"
            raise invalid("return_speculation", message)
        if self.stream_options is not None:
            self.stream_options.refuse_extra("stream_options.")
            if not self.stream:
                raise invalid("stream_options", "stream_options needs stream to be true")
            if self.stream_options.continuous_usage_stats and not self.stream_options.include_usage:
                message = "stream_options.continuous_usage_stats needs include_usage to be true"
                raise invalid("stream_options", message)
        if self.response_format is not None:
            self.response_format.refuse_unsupported()
        if self.structured_outputs is not None:
            self.structured_outputs.refuse_unsupported()
            if self.response_format is not None and self.response_format.type != "text":
                message = "structured_outputs and response_format both say what the answer must be; give one"
                raise invalid("structured_outputs", message)
        if self.return_tokens_as_token_ids and self.told_tokens is None:
            message = "return_tokens_as_token_ids says how logprobs are written; ask for those too"
            raise invalid("return_tokens_as_token_ids", message)
        if self.truncate_prompt_tokens == 0:
            message = "truncate_prompt_tokens = 0 leaves no prompt; use 1 or more, or -1 for what fits"
            raise invalid("truncate_prompt_tokens", message)
        if self.constrained and self.rules:
            what = self.structure.param if self.structure else "calls that must be, or must follow a schema"
            raise invalid(self.rules[0], f"{self.rules[0]} cannot go with {what}; leave one out")

    def _refuse_extra(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if name not in NO_EFFECT:
                refuse(name, value, self.neutral.get(name))


class ChatRequest(AnswerRequest, ChatPrompt):
    """Body of `POST /v1/chat/completions`."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL | CHAT_NEUTRAL

    max_completion_tokens: Annotated[int, Field(ge=1), Whole] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def shown_tools(self) -> list[Tool]:
        """The tools that the model gets to see: none where it may not call any."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def callable_tools(self) -> list[Tool]:
        """Those of them that it may call."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.shown_tools if tool.function.name == name]
        return self.shown_tools

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def follows_schemas(self) -> bool:
        """Whether calls must follow the schemas of their functions."""
        return self.must_call or any(tool.function.strict for tool in self.callable_tools)

    @property
    def constrained(self) -> bool:
        return super().constrained or self.follows_schemas

    @property
    def one_call(self) -> bool:
        """Whether the answer ends with its first call."""
        return self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool)

    @property
    def token_limit(self) -> int | None:
        """The cap on the answer's tokens, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def told_tokens(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        self.refuse_prompt()
        self._refuse_tools()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.token_limit:
            message = (
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; "
                "they mean the same, so give one"
            )
            raise invalid("max_tokens", message)

    def _refuse_tools(self) -> None:
        tools = self.tools or []
        if isinstance(self.tool_choice, NamedTool):
            self.tool_choice.refuse_extra("tool_choice.")
            self.tool_choice.function.refuse_extra("tool_choice.function.")
            if self.tool_choice.function.name not in [tool.function.name for tool in tools]:
                name = self.tool_choice.function.name
                raise invalid("tool_choice", f"tool_choice names {name}, which is no tool; add it")
        if self.must_call and not tools:
            raise invalid("tool_choice", "tool_choice asks for a call and there are no tools; add some")
        if self.shown_tools and self.structure is not None:
            param = self.structure.param
            raise invalid(param, f"{param} cannot go with tools that may be called; use tool_choice none")


class CompletionRequest(AnswerRequest):
    """Body of `POST /v1/completions`: text or token ids to go on from, without a chat template."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL | TEXT_NEUTRAL

    prompt: Prompt
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole] | None = None

    @property
    def told_tokens(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One for each that is to be answered."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        return [prompt] if isinstance(prompt[0], int) else prompt
