"""One request from the engine's queue to its last piece of text."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from stages.decoding import SamplingParams, TokenLogprobs
from stages.serve.answer import Answer
from stages.serve.api_error import ApiError
from stages.serve.choice import Choice
from stages.serve.engine_thread import (
    Ended,
    EngineStoppedError,
    EngineThread,
    Event,
    Job,
    NewTokens,
    QueueFullError,
)
from stages.serve.grammar import GrammarMask
from stages.serve.metrics import Metrics
from stages.serve.response import PromptTokensDetails, SpeculationStats, Usage
from stages.serve.tool_calls import CallDelta

MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True)
class Question:
    """One answer that is wanted: the prompt, how to decode, with drafts or not, and the maker of the text."""

    prompt_ids: list[int]
    params: SamplingParams
    answer: Answer
    drafts: bool = True


@dataclass(frozen=True)
class Piece:
    """Ids of an answer that came together, and the text that each of them has made certain.

    texts: one for each id, often empty where a character or a stop string is not complete; a last one
        without an id is what was still held when the answer ended.
    accepted: so many of the ids, the first ones, were drafted; the target drew the others itself.
    calls: what has come of calls of tools.
    logprobs: of each id, where they are wanted.
    """

    choice: Choice
    texts: list[str]
    token_ids: list[int]
    accepted: int
    calls: list[CallDelta] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of the text that has become certain."""
        return "".join(self.texts)


class Completion:
    """A request's answers in the engine, and what has come of them. Lives on the event loop.

    The engine's thread only hands over token ids; they become text here.

    Attributes:
        choices: the answers, those to one prompt after those to the prompt before.
        seed: of all of them.
    """

    def __init__(
        self,
        engine: EngineThread,
        choices: Sequence[Choice],
        events: asyncio.Queue[tuple[int, Event]],
        n: int,
    ) -> None:
        self._engine = engine
        self._events = events
        self._submitted = time.monotonic()
        self._n = n
        self.choices = choices
        self.seed = choices[0].job.params.seed

    @classmethod
    def submit(
        cls,
        engine: EngineThread,
        questions: Sequence[Question],
        n: int,
        metrics: Metrics,
        client: str = "",
    ) -> Completion:
        """Puts a request in the queue.

        Args:
            questions: what is to be answered, `n` for each prompt in turn.
            client: who asks.

        Raises:
            ApiError: 429 when the queue is full, 503 when the server is stopping.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()

        def deliver_to(index: int) -> Callable[[Event], None]:
            def deliver(event: Event) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                    loop.call_soon_threadsafe(events.put_nowait, (index, event))

            return deliver

        choices = [
            Choice(i, Job(q.prompt_ids, q.params, deliver_to(i), client, q.drafts), q.answer, metrics)
            for i, q in enumerate(questions)
        ]
        try:
            engine.submit(*(choice.job for choice in choices))
        except QueueFullError:
            wait = max(1, min(MAX_RETRY_AFTER_S, round(engine.mean_seconds)))
            message = f"{engine.waiting} requests wait already; try again in {wait} s"
            raise ApiError(
                429, message, kind="rate_limit_error", code="queue_full", retry_after=wait
            ) from None
        except EngineStoppedError:
            raise _stopped() from None
        completion = cls(engine, choices, events, n)
        metrics.prompts(completion.prompt_tokens)
        return completion

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answers' text as it becomes certain; those of one choice, joined, are its whole text. The last
        piece of a choice comes with its finish reason set, even if there is no text in it.

        Raises:
            ApiError: 503 when the server stops before the end, 500 when the engine fails, 400 when a grammar
                cannot be followed to the end.
        """
        unfinished = set(range(len(self.choices)))
        while unfinished:
            index, event = await self._events.get()
            choice = self.choices[index]
            answer = choice.answer
            if index not in unfinished:
                continue
            before = answer.tokens
            accepted = 0
            if isinstance(event, NewTokens):
                texts, accepted = choice.take(event), event.accepted
            else:
                rest = self._end(answer, event)
                texts = [rest] if rest else []
            if answer.finish_reason is not None:
                unfinished.remove(index)
                self._engine.cancel(choice.job)  # a stop string is found here, while the engine goes on
                mask = choice.job.params.token_mask
                if isinstance(mask, GrammarMask) and mask.fault and answer.finish_reason != "length":
                    raise mask.fault
            ids = answer.token_ids[before:]
            accepted = min(accepted, len(ids))
            yield Piece(choice, texts, ids, accepted, answer.new_calls(), choice.logprobs[before:])

    def cancel(self) -> None:
        """Frees the engine of what it still does for this request, if anything."""
        for choice in self.choices:
            self._engine.cancel(choice.job)

    def _end(self, answer: Answer, event: Ended) -> str:
        if event.outcome == "complete":
            return answer.close()
        if event.outcome == "failed":
            message = "the server failed to answer; its log says why"
            raise ApiError(500, message, kind="server_error", code="engine_error") from event.error
        raise _stopped()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once."""
        return sum(len(choice.job.prompt_ids) for choice in self.choices[:: self._n])

    @property
    def cached_tokens(self) -> int:
        """Those of them that were not read, as an earlier sequence began with them."""
        return sum(choice.stats.reused for choice in self.choices[:: self._n])

    @property
    def usage(self) -> Usage:
        """Tokens so far, and how they came about."""
        prompt, answers = self.prompt_tokens, sum(choice.answer.tokens for choice in self.choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=answers,
            total_tokens=prompt + answers,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
            speculation=self._speculation(),
        )

    def _speculation(self) -> SpeculationStats:
        each = [choice.stats for choice in self.choices]
        steps, tokens = sum(s.steps for s in each), sum(s.tokens for s in each)
        accepted = sum(s.accepted for s in each)
        positions = max(len(s.accepted_per_depth) for s in each)
        counts = [
            sum(s.accepted_per_depth[i] for s in each if i < len(s.accepted_per_depth))
            for i in range(positions)
        ]
        return SpeculationStats(
            steps=steps,
            drafted=sum(s.drafted for s in each),
            accepted=accepted,
            accepted_per_position=counts,
            accepted_per_step=round(accepted / steps, 3) if steps else None,
            tokens_per_step=round(tokens / steps, 3) if steps else None,
        )

    @property
    def seconds(self) -> float:
        """Since it came."""
        return time.monotonic() - self._submitted


def _stopped() -> ApiError:
    return ApiError(503, "the server is stopping", kind="server_error", code="server_stopping")
