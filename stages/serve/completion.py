"""One request from the engine's queue to its last piece of text."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from stages.decoding import DecodeStats, SamplingParams
from stages.serve.answer import Answer
from stages.serve.api import SpeculationStats, Usage
from stages.serve.api_error import ApiError
from stages.serve.engine_thread import (
    Ended,
    EngineStoppedError,
    EngineThread,
    Event,
    Job,
    NewTokens,
    QueueFullError,
)

MAX_RETRY_AFTER_S = 60


class Completion:
    """A request in the engine's queue, and what has come of it. Lives on the event loop.

    The engine's thread only hands over token ids; they become text here.

    Attributes:
        answer: the text's maker; knows the finish reason.
    """

    def __init__(self, engine: EngineThread, job: Job, answer: Answer, events: asyncio.Queue[Event]) -> None:
        self._engine = engine
        self._job = job
        self._events = events
        self._stats = DecodeStats()
        self._submitted = time.monotonic()
        self._first: float | None = None
        self._last = self._submitted
        self.answer = answer

    @classmethod
    def submit(
        cls, engine: EngineThread, prompt_ids: list[int], params: SamplingParams, answer: Answer
    ) -> Completion:
        """Puts a request in the queue.

        Raises:
            ApiError: 429 when the queue is full, 503 when the server is stopping.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def deliver(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(prompt_ids, params, deliver)
        try:
            engine.submit(job)
        except QueueFullError:
            wait = max(1, min(MAX_RETRY_AFTER_S, round(engine.mean_seconds)))
            message = f"{engine.waiting} requests wait already; try again in {wait} s"
            raise ApiError(
                429, message, kind="rate_limit_error", code="queue_full", retry_after=wait
            ) from None
        except EngineStoppedError:
            raise _stopped() from None
        return cls(engine, job, answer, events)

    async def pieces(self) -> AsyncIterator[str]:
        """The answer's text as it becomes certain; joined, it is the whole text.

        Raises:
            ApiError: 503 when the server stops before the end, 500 when the engine fails.
        """
        while True:
            event = await self._events.get()
            text = self._take(event) if isinstance(event, NewTokens) else self._end(event)
            ended = self.answer.finish_reason is not None
            if ended:
                self.cancel()  # a stop string is found here, while the engine goes on
            if text:
                yield text
            if ended:
                return

    def cancel(self) -> None:
        """Frees the engine of what it still does for this request, if anything."""
        self._engine.cancel(self._job)

    def _take(self, event: NewTokens) -> str:
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last
        self._stats = event.stats
        return self.answer.push(event.token_ids)

    def _end(self, event: Ended) -> str:
        if event.outcome == "complete":
            return self.answer.close()
        if event.outcome == "failed":
            message = "the server failed to answer; its log says why"
            raise ApiError(500, message, kind="server_error", code="engine_error") from event.error
        raise _stopped()

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt, answer = len(self._job.prompt_ids), self.answer.tokens
        return Usage(prompt_tokens=prompt, completion_tokens=answer, total_tokens=prompt + answer)

    @property
    def stats(self) -> SpeculationStats:
        """How the tokens came about: counts of the cycles so far, each taken whole."""
        stats = self._stats
        return SpeculationStats(
            steps=stats.steps,
            drafted=stats.drafted,
            accepted=stats.accepted,
            accepted_per_step=round(stats.accepted_per_step, 3) if stats.steps else None,
            tokens_per_step=round(stats.tokens_per_step, 3) if stats.steps else None,
            seed=self._job.params.seed,
        )

    def summary(self) -> str:
        """Counts and times, for the log: no text of the user's."""
        usage, stats = self.usage, self.stats
        parts = [f"{usage.prompt_tokens}+{usage.completion_tokens} tokens"]
        if self._first is not None:
            parts.append(f"first after {self._first - self._submitted:.2f} s")
            if self._last > self._first:
                parts.append(f"{(usage.completion_tokens - 1) / (self._last - self._first):.1f} tok/s")
        if stats.drafted:
            parts.append(f"{stats.accepted_per_step:.2f} accepted/step")
        return ", ".join(parts)


def _stopped() -> ApiError:
    return ApiError(503, "the server is stopping", kind="server_error", code="server_stopping")
