"""What every engine takes and gives, and the engine that is built in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stages.decoding import GenerationRequest, GenerationResult, generate_batch
from stages.targets import Target


@dataclass(frozen=True)
class Question(GenerationRequest):
    """A prompt to answer, as token ids and as the chat that they were rendered from.

    Where a template shows an earlier answer otherwise than it was sampled, only the ids are what the target
    saw; see `AnswerEngine.reads_messages`.
    """

    messages: list[dict[str, str]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Unusable:
    """An answer that cannot be used: `reason` is the name it is counted under, `detail` says more."""

    id: str
    reason: str
    detail: str


class AnswerEngine(Protocol):
    """Answers questions."""

    @property
    def reads_messages(self) -> bool:
        """Whether it renders the chat itself, so that `prompt_ids` must be what the template makes of it."""

    def answers(self, questions: Sequence[Question]) -> Iterator[GenerationResult | Unusable]:
        """The answer to each question, in the order in which they are finished.

        Raises:
            EagleError: the engine cannot go on.
        """

    def close(self) -> None:
        """Frees what the engine holds. Again is nothing."""


class TransformersEngine:
    """The target itself, in this process."""

    reads_messages = False

    def __init__(self, target: Target, batch_size: int) -> None:
        self._target = target
        self._batch_size = batch_size

    def answers(self, questions: Sequence[Question]) -> Iterator[GenerationResult | Unusable]:
        yield from generate_batch(self._target, questions, max_batch=self._batch_size)

    def close(self) -> None:
        """Nothing to free."""
