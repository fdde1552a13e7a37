"""The engine on a thread of its own: requests wait in a queue, and as many as have a slot are answered
together."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from stages.decoding import (
    DecodeStats,
    Emission,
    Engine,
    GenerationRequest,
    SamplingParams,
    TokenLogprobs,
)
from stages.errors import EagleError
from stages.serve.fair_queue import FairQueue


class QueueFullError(Exception):
    """As many requests wait as may."""


class EngineStoppedError(Exception):
    """The engine takes no more requests."""


@dataclass(frozen=True)
class NewTokens:
    """What one cycle has given a request, and the counts with it. The first cycle is the prompt's own.

    accepted: so many of the ids, the first ones, were drafted.
    logprobs: of each id, where they are wanted.
    """

    token_ids: list[int]
    stats: DecodeStats
    accepted: int = 0
    logprobs: list[TokenLogprobs] | None = None


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
        client: who asks, so that all get their turn.
        drafts: false decodes it plainly.
        deliver: called on the engine's thread with each event, in order; must return at once.
        cancelled: set when nobody wants the rest; the engine drops the job at its next step.
        began: when it got its slot, by the monotonic clock.
    """

    prompt_ids: list[int]
    params: SamplingParams
    deliver: Callable[[Event], None]
    client: str = ""
    drafts: bool = True
    cancelled: bool = False
    began: float = 0.0


class EngineThread:
    """Decodes as many jobs together as the engine has slots; they join in order of arrival, clients in turns.

    Args:
        engine: used on no other thread from `start` on.
        max_queue: jobs that may wait besides those that run.

    Attributes:
        requests: jobs that had a slot and ended, in whatever way.
    """

    def __init__(self, engine: Engine, max_queue: int) -> None:
        self._engine = engine
        self._max_queue = max_queue
        self._waiting: FairQueue[Job] = FairQueue(max_queue)
        self._running: dict[str, Job] = {}
        self._begun = 0
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
        """Jobs being decoded."""
        return len(self._running)

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
        """About the time after which a place in a full queue becomes free, by the jobs of late."""
        return self._mean_seconds / self._engine.cache.slots

    @property
    def max_queue(self) -> int:
        """Jobs that may wait, and so the most that can come together."""
        return self._max_queue

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, *jobs: Job) -> None:
        """Puts jobs of one client in the queue, all of them or none.

        Raises:
            QueueFullError: more than `max_queue` jobs would wait, and more than the client's share of them.
            EngineStoppedError: `stop` was called.
        """
        with self._changed:
            if self._stopping:
                raise EngineStoppedError
            if not self._waiting.add(*jobs):
                raise QueueFullError
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Forgets a job: at once if it waits, after the present step if it runs, in vain if it is done."""
        with self._changed:
            job.cancelled = True
            if self._waiting.remove(job):
                job.deliver(Ended("cancelled"))

    def stop(self, grace_s: float) -> None:
        """Ends the jobs that wait, and those that run after `grace_s` seconds. Does not wait for either."""
        with self._changed:
            self._stopping = True
            self._deadline = time.monotonic() + grace_s
            for job in self._waiting:
                job.deliver(Ended("stopped"))
            self._waiting.clear()
            self._changed.notify()

    def hurry(self) -> None:
        """Ends the running jobs at the next step. Takes no lock, so that a signal handler may call it."""
        self._deadline = 0.0

    def join(self) -> None:
        """Waits until the thread has ended, after `stop`."""
        self._thread.join()

    def _run(self) -> None:
        while self._admit():
            self._end_cancelled()
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._end_all(Ended("stopped"))
            try:
                emissions = self._engine.step()
            except Exception as error:  # a bug: it is reported by all that ran, and the others go on
                self._end_all(Ended("failed", error))
                continue
            for emission in emissions:
                self._deliver(emission)

    def _admit(self) -> bool:
        """Give waiting jobs the free slots, and wait for one where nothing runs; false when all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._stopping)
            joining = []
            while self._waiting and len(self._running) < self._engine.cache.slots:
                job = self._waiting.take(Counter(job.client for job in self._running.values()))
                job.began = time.monotonic()
                self._begun += 1
                self._running[str(self._begun)] = job
                joining.append(str(self._begun))
            if not self._running:
                return not self._stopping
        for name in joining:
            job = self._running[name]
            try:
                self._engine.submit(GenerationRequest(name, job.prompt_ids, job.params), drafts=job.drafts)
            except EagleError as error:
                self._end(name, Ended("failed", error))
        return True

    def _deliver(self, emission: Emission) -> None:
        job = self._running[emission.id]
        stats = emission.stats  # which the engine goes on counting in
        taken = replace(stats, accepted_per_depth=list(stats.accepted_per_depth))
        job.deliver(NewTokens(emission.tokens, taken, emission.accepted, emission.logprobs))
        if emission.finish_reason is not None:
            self._end(emission.id, Ended("complete"))

    def _end_cancelled(self) -> None:
        for name in [name for name, job in self._running.items() if job.cancelled]:
            self._end(name, Ended("cancelled"))

    def _end_all(self, event: Ended) -> None:
        for name in list(self._running):
            self._end(name, event)

    def _end(self, name: str, event: Ended) -> None:
        job = self._running.pop(name)
        self._engine.cancel(name)
        self._mean_seconds += 0.2 * (time.monotonic() - job.began - self._mean_seconds)
        self.requests += 1
        job.deliver(event)
