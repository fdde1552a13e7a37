"""The two wire formats of an answer: OpenAI's chat completions and its older text completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol

from pydantic import BaseModel

from stages.decoding import TokenLogprobs
from stages.serve.choice import Choice
from stages.serve.completion import Completion, Piece
from stages.serve.logprobs import ChatLogprobs, TextLogprobs, chat_logprobs, text_logprobs
from stages.serve.response import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Delta,
    FunctionDelta,
    StepSpeculation,
    TextChoice,
    TextCompletion,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from stages.serve.token_text import TextOffsets, TokenTexts
from stages.serve.tool_calls import Call, CallDelta


class Wire(Protocol):
    """How a completion is written.

    Attributes:
        id: the reply's name.
    """

    id: str

    def whole(self, texts: list[str]) -> BaseModel:
        """The one body, with the text of each choice."""

    def piece(self, piece: Piece, first: bool) -> ChatCompletionChunk | TextCompletion:
        """The event of a piece of text, `first` for the first of its choice."""

    def end(self, choice: Choice) -> ChatCompletionChunk | TextCompletion:
        """The event that says why an answer ended."""

    def usage(self, usage: Usage) -> BaseModel:
        """The last event, if it is asked for."""


class _Answered:
    """What both forms tell of.

    Args:
        ids: whether token ids are shown.
        steps: whether events tell which of their tokens were drafted.
        texts: of tokens, for their log-probabilities; without them there are none.
    """

    prefix: ClassVar[str]

    def __init__(
        self, model: str, completion: Completion, ids: bool, steps: bool, texts: TokenTexts | None = None
    ) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._completion = completion
        self._ids = ids
        self._steps = steps
        self._texts = texts


class ChatWire(_Answered):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"

    def whole(self, texts: list[str]) -> ChatCompletion:
        choices = []
        for choice, text in zip(self._completion.choices, texts, strict=True):
            answer = choice.answer
            assert answer.finish_reason is not None
            choices.append(
                ChatChoice(
                    index=choice.index,
                    message=_message(text, answer.calls),
                    logprobs=self._logprobs(answer.token_ids, choice.logprobs),
                    finish_reason=answer.finish_reason,
                    stop_reason=answer.stop_reason,
                    token_ids=answer.token_ids if self._ids else None,
                )
            )
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=self._completion.usage,
            seed=self._completion.seed,
            prompt_token_ids=self._prompt_ids(True),
        )

    def piece(self, piece: Piece, first: bool) -> ChatCompletionChunk:
        role: Literal["assistant"] | None = "assistant" if first else None
        part = ChunkChoice(
            index=piece.choice.index,
            delta=Delta(
                role=role,
                content=None if piece.calls and not piece.text else piece.text,
                tool_calls=[_call_delta(call) for call in piece.calls] or None,
            ),
            logprobs=self._logprobs(piece.token_ids, piece.logprobs),
            token_ids=piece.token_ids if self._ids else None,
            speculation=_step(piece) if self._steps else None,
        )
        return self._chunk(part, prompt_ids=self._prompt_ids(first))

    def end(self, choice: Choice) -> ChatCompletionChunk:
        answer = choice.answer
        return self._chunk(
            ChunkChoice(
                index=choice.index,
                delta=Delta(),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
                token_ids=[] if self._ids else None,
            )
        )

    def usage(self, usage: Usage) -> ChatCompletionChunk:
        return self._chunk(usage=usage)

    def _logprobs(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return None if self._texts is None else chat_logprobs(self._texts, token_ids, entries)

    def _prompt_ids(self, wanted: bool) -> list[int] | None:
        return self._completion.choices[0].job.prompt_ids if self._ids and wanted else None

    def _chunk(
        self, *choices: ChunkChoice, usage: Usage | None = None, prompt_ids: list[int] | None = None
    ) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=list(choices),
            usage=usage,
            seed=self._completion.seed,
            prompt_token_ids=prompt_ids,
        )


class TextWire(_Answered):
    """`/v1/completions`."""

    prefix = "cmpl"

    def __init__(
        self, model: str, completion: Completion, ids: bool, steps: bool, texts: TokenTexts | None = None
    ) -> None:
        super().__init__(model, completion, ids, steps, texts)
        self._offsets: dict[int, TextOffsets] = {}

    def whole(self, texts: list[str]) -> TextCompletion:
        parts = []
        for choice, text in zip(self._completion.choices, texts, strict=True):
            part = self._part(choice, text, choice.answer.token_ids, prompt=True)
            part.logprobs = self._logprobs(choice.index, choice.answer.token_ids, choice.logprobs)
            part.finish_reason, part.stop_reason = choice.answer.finish_reason, choice.answer.stop_reason
            parts.append(part)
        return self._body(*parts, usage=self._completion.usage)

    def piece(self, piece: Piece, first: bool) -> TextCompletion:
        part = self._part(piece.choice, piece.text, piece.token_ids, prompt=first)
        part.logprobs = self._logprobs(piece.choice.index, piece.token_ids, piece.logprobs)
        part.speculation = _step(piece) if self._steps else None
        return self._body(part)

    def end(self, choice: Choice) -> TextCompletion:
        part = self._part(choice, "", [], prompt=False)
        part.finish_reason, part.stop_reason = choice.answer.finish_reason, choice.answer.stop_reason
        return self._body(part)

    def usage(self, usage: Usage) -> TextCompletion:
        return self._body(usage=usage)

    def _logprobs(
        self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> TextLogprobs | None:
        if self._texts is None:
            return None
        special = self._completion.choices[index].answer.with_special
        offsets = self._offsets.setdefault(index, TextOffsets(self._texts, special=special))
        return text_logprobs(self._texts, offsets, token_ids, entries)

    def _part(self, choice: Choice, text: str, token_ids: list[int], *, prompt: bool) -> TextChoice:
        return TextChoice(
            index=choice.index,
            text=text,
            token_ids=token_ids if self._ids else None,
            prompt_token_ids=choice.job.prompt_ids if self._ids and prompt else None,
        )

    def _body(self, *choices: TextChoice, usage: Usage | None = None) -> TextCompletion:
        return TextCompletion(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=list(choices),
            usage=usage,
            seed=self._completion.seed,
        )


def _message(text: str, calls: Sequence[Call]) -> AssistantMessage:
    made = [
        ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in calls
    ]
    return AssistantMessage(content=text if text or not made else None, tool_calls=made or None)


def _call_delta(delta: CallDelta) -> ToolCallDelta:
    return ToolCallDelta(
        index=delta.index,
        id=delta.id,
        type=None if delta.id is None else "function",
        function=FunctionDelta(name=delta.name, arguments=delta.arguments),
    )


def _step(piece: Piece) -> StepSpeculation:
    seconds = round(piece.choice.taken_s, 5)
    return StepSpeculation(accepted=piece.accepted, texts=piece.texts, seconds=seconds)
