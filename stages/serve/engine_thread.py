"""The engine on a thread of its own: requests wait in a queue and are answered one after another."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from stages.decoding import DecodeStats, EagleModel, SamplingParams


class QueueFullError(Exception):
    """As many requests wait as may."""


class EngineStoppedError(Exception):
    """The engine takes no more requests."""


@dataclass(frozen=True)
class NewTokens:
    """What one cycle has given a request, and the counts with it. The first cycle is the prompt's own."""

    token_ids: list[int]
    stats: DecodeStats


@dataclass(frozen=True)
class Ended:
    """A request's last event: nothing follows. `error` is what the engine raised, with outcome "failed"."""

    outcome: Literal["complete", "cancelled", "stopped", "failed"]
    error: Exception | None = None


Event = NewTokens | Ended


@dataclass(eq=False)
class Job:
    """One request on its way through the engine.

    Attributes:
        deliver: called on the engine's thread with each event, in order; must return at once.
        cancelled: set when nobody wants the rest; the engine drops the job at its next cycle.
    """

    prompt_ids: list[int]
    params: SamplingParams
    deliver: Callable[[Event], None]
    cancelled: bool = False


class EngineThread:
    """Decodes one job at a time, in order of arrival.

    Args:
        model: used on no other thread from `start` on.
        max_queue: jobs that may wait besides the one that runs.

    Attributes:
        requests: jobs taken from the queue and ended, in whatever way.
    """

    def __init__(self, model: EagleModel, max_queue: int) -> None:
        self._model = model
        self._max_queue = max_queue
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._deadline: float | None = None
        self._mean_seconds = 1.0
        self.requests = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def running(self) -> int:
        """Jobs being decoded: 0 or 1."""
        return int(self._running is not None)

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._waiting)

    @property
    def stopping(self) -> bool:
        """Whether it takes no more jobs."""
        return self._stopping

    @property
    def mean_seconds(self) -> float:
        """Seconds a job has taken of late: about when a place in a full queue becomes free."""
        return self._mean_seconds

    def submit(self, job: Job) -> None:
        """Puts a job at the end of the queue.

        Raises:
            QueueFullError: `max_queue` jobs wait.
            EngineStoppedError: `stop` was called.
        """
        with self._changed:
            if self._stopping:
                raise EngineStoppedError
            if len(self._waiting) >= self._max_queue:
                raise QueueFullError
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Forgets a job: at once if it waits, after the present cycle if it runs, in vain if it is done."""
        with self._changed:
            job.cancelled = True
            if job in self._waiting:
                self._waiting.remove(job)
                job.deliver(Ended("cancelled"))

    def stop(self, grace_s: float) -> None:
        """Ends the jobs that wait, and the running one after `grace_s` seconds. Does not wait for either."""
        with self._changed:
            self._stopping = True
            self._deadline = time.monotonic() + grace_s
            for job in self._waiting:
                job.deliver(Ended("stopped"))
            self._waiting.clear()
            self._changed.notify()

    def hurry(self) -> None:
        """Ends the running job at its next cycle. Takes no lock, so that a signal handler may call it."""
        self._deadline = 0.0

    def join(self) -> None:
        """Waits until the thread has ended, after `stop`."""
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            start = time.monotonic()
            ended = self._answer(job)
            self._mean_seconds += 0.2 * (time.monotonic() - start - self._mean_seconds)
            self._running = None
            self.requests += 1
            job.deliver(ended)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            self._running = self._waiting.popleft() if self._waiting else None
            return self._running

    def _answer(self, job: Job) -> Ended:
        stats = DecodeStats()
        try:
            for token_ids in self._model.stream(job.prompt_ids, job.params, stats=stats):
                if job.cancelled:
                    return Ended("cancelled")
                job.deliver(NewTokens(token_ids, replace(stats)))
                if self._deadline is not None and time.monotonic() > self._deadline:
                    return Ended("stopped")
        except Exception as error:  # a bug, but one request's: it is reported there and the others go on
            return Ended("failed", error)
        return Ended("complete")
