"""The two wire formats of an answer: OpenAI's chat completions and its older text completions."""

from __future__ import annotations

import time
import uuid
from typing import Literal, Protocol

from pydantic import BaseModel

from stages.serve.choice import Choice
from stages.serve.completion import Completion, Piece
from stages.serve.response import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Delta,
    TextChoice,
    TextCompletion,
    Usage,
)


class Wire(Protocol):
    """How a completion is written.

    Attributes:
        id: the reply's name.
    """

    id: str

    def whole(self, texts: list[str]) -> BaseModel:
        """The one body, with the text of each choice."""

    def piece(self, piece: Piece, first: bool) -> BaseModel:
        """The event of a piece of text, `first` for the first of its choice."""

    def end(self, choice: Choice) -> BaseModel:
        """The event that says why an answer ended."""

    def usage(self, usage: Usage) -> BaseModel:
        """The last event, if it is asked for."""


class ChatWire:
    """`/v1/chat/completions`.

    Args:
        ids: whether token ids are shown.
    """

    def __init__(self, model: str, completion: Completion, ids: bool) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._completion = completion
        self._ids = ids

    def whole(self, texts: list[str]) -> ChatCompletion:
        choices = []
        for choice, text in zip(self._completion.choices, texts, strict=True):
            answer = choice.answer
            assert answer.finish_reason is not None
            choices.append(
                ChatChoice(
                    index=choice.index,
                    message=AssistantMessage(content=text),
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
            delta=Delta(role=role, content=piece.text),
            token_ids=piece.token_ids if self._ids else None,
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


class TextWire:
    """`/v1/completions`.

    Args:
        ids: whether token ids are shown.
    """

    def __init__(self, model: str, completion: Completion, ids: bool) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._completion = completion
        self._ids = ids

    def whole(self, texts: list[str]) -> TextCompletion:
        parts = []
        for choice, text in zip(self._completion.choices, texts, strict=True):
            part = self._part(choice, text, choice.answer.token_ids, prompt=True)
            part.finish_reason, part.stop_reason = choice.answer.finish_reason, choice.answer.stop_reason
            parts.append(part)
        return self._body(*parts, usage=self._completion.usage)

    def piece(self, piece: Piece, first: bool) -> TextCompletion:
        return self._body(self._part(piece.choice, piece.text, piece.token_ids, prompt=first))

    def end(self, choice: Choice) -> TextCompletion:
        part = self._part(choice, "", [], prompt=False)
        part.finish_reason, part.stop_reason = choice.answer.finish_reason, choice.answer.stop_reason
        return self._body(part)

    def usage(self, usage: Usage) -> TextCompletion:
        return self._body(usage=usage)

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
