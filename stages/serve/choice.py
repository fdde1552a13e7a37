"""One answer of a request on its way from the engine: its text, its counts, its times."""

from __future__ import annotations

import time

from stages.decoding import DecodeStats, TokenLogprobs
from stages.serve.answer import Answer
from stages.serve.engine_thread import Job, NewTokens
from stages.serve.metrics import Metrics


class Choice:
    """One of the answers that a request asked for.

    Attributes:
        index: its place among them.
        answer: the text's maker; knows the finish reason.
        job: what the engine does for it.
        stats: counts of the cycles so far, each taken whole.
        logprobs: of each id so far, where they are wanted.
    """

    def __init__(self, index: int, job: Job, answer: Answer, metrics: Metrics) -> None:
        self.index = index
        self.answer = answer
        self.job = job
        self.stats = DecodeStats()
        self.logprobs: list[TokenLogprobs] = []
        self._metrics = metrics
        self._submitted = time.monotonic()
        self._first: float | None = None
        self._last = self._submitted

    def take(self, event: NewTokens) -> list[str]:
        """Takes the next tokens; returns the text that each of them has made certain."""
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last
            self._metrics.first_token(self._first - self._submitted, event.stats.reused)
        before = self.answer.tokens
        texts = [self.answer.push([token_id]) for token_id in event.token_ids]
        self._metrics.cycle(self.answer.tokens - before, self.stats, event.stats)
        self.stats = event.stats
        self.logprobs += (event.logprobs or [])[: self.answer.tokens - before]
        return texts[: self.answer.tokens - before]

    @property
    def taken_s(self) -> float:
        """Seconds until the tokens of late."""
        return self._last - self._submitted

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None before it."""
        return None if self._first is None else self._first - self._submitted

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of each token after the first; None before the second."""
        if self._first is None or self.answer.tokens < 2:
            return None
        return (self._last - self._first) / (self.answer.tokens - 1)
