from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from stages.decoding import EagleModel, SamplingParams
from stages.serve.engine_thread import (
    Ended,
    EngineStoppedError,
    EngineThread,
    Event,
    Job,
    NewTokens,
    QueueFullError,
)
from stages.targets import Target
from tests.serve.running_server import soon

PROMPT = [1, 2, 3]
LONG = SamplingParams(max_new_tokens=250, ignore_eos=True)
SHORT = SamplingParams(max_new_tokens=3, ignore_eos=True)


class Recorder:
    """A job and its events."""

    def __init__(self, params: SamplingParams, prompt_ids: list[int] | None = None, client: str = "") -> None:
        self.events: list[Event] = []
        self.done = threading.Event()
        self.job = Job(prompt_ids or PROMPT, params, self._deliver, client)
        self.ended_at = 0.0

    def _deliver(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Ended):
            self.ended_at = time.monotonic()
            self.done.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events if isinstance(event, NewTokens) for token in event.token_ids]

    def outcome(self) -> str:
        assert self.done.wait(20)
        last = self.events[-1]
        assert isinstance(last, Ended)
        return last.outcome


@pytest.fixture
def start(plain: EagleModel) -> Iterator[Callable[[int], EngineThread]]:
    engines: list[EngineThread] = []

    def start(max_queue: int) -> EngineThread:
        engines.append(EngineThread(plain.engine, max_queue))
        engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop(0.0)
        engine.join()


def running(engine: EngineThread) -> Recorder:
    """A long job that the engine has begun."""
    job = Recorder(LONG)
    engine.submit(job.job)
    assert soon(lambda: bool(job.events))
    return job


def test_jobs_are_answered_in_the_order_of_their_arrival(
    plain: EagleModel, start: Callable[[int], EngineThread]
) -> None:
    engine = start(8)
    jobs = [Recorder(SHORT, [i + 1, i + 2]) for i in range(5)]
    for job in jobs:
        engine.submit(job.job)
    assert [job.outcome() for job in jobs] == ["complete"] * 5
    assert sorted(jobs, key=lambda job: job.ended_at) == jobs
    for job in jobs:
        assert job.token_ids == plain.generate(job.job.prompt_ids, SHORT).token_ids


def test_a_client_with_one_job_does_not_wait_for_all_of_another(start: Callable[[int], EngineThread]) -> None:
    engine = start(6)
    first = running(engine)
    many = [Recorder(SHORT, client="busy") for _ in range(6)]
    engine.submit(*(job.job for job in many))
    one, two = Recorder(SHORT, client="calm"), Recorder(SHORT, client="late")
    engine.submit(one.job)  # beyond the limit, and within its share
    engine.submit(two.job)
    with pytest.raises(QueueFullError):
        engine.submit(Recorder(SHORT, client="busy").job)
    engine.cancel(first.job)
    for job in (*many, one, two):
        assert job.outcome() == "complete"
    order = sorted([*many, one, two], key=lambda job: job.ended_at)
    assert order[:3] == [many[0], one, two]
    assert order[3:] == many[1:]


def test_a_full_queue_takes_no_more_until_one_leaves(start: Callable[[int], EngineThread]) -> None:
    engine = start(1)
    first, second, third = running(engine), Recorder(SHORT), Recorder(SHORT)
    engine.submit(second.job)
    with pytest.raises(QueueFullError):
        engine.submit(third.job)
    engine.cancel(second.job)
    assert second.events == [Ended("cancelled")]
    engine.submit(third.job)
    engine.cancel(first.job)
    assert (first.outcome(), third.outcome()) == ("cancelled", "complete")


def test_cancelling_the_running_job_ends_it_early(start: Callable[[int], EngineThread]) -> None:
    engine = start(1)
    job = running(engine)
    engine.cancel(job.job)
    assert job.outcome() == "cancelled"
    assert len(job.token_ids) < LONG.max_new_tokens


def test_a_job_that_fails_leaves_the_next_unharmed(start: Callable[[int], EngineThread]) -> None:
    engine = start(4)
    broken, sound = Recorder(SHORT, [10**6]), Recorder(SHORT)
    engine.submit(broken.job)
    engine.submit(sound.job)
    assert (broken.outcome(), sound.outcome()) == ("failed", "complete")


def test_stopping_lets_the_running_job_finish_and_turns_the_others_away(
    start: Callable[[int], EngineThread],
) -> None:
    engine = start(4)
    first, second = running(engine), Recorder(SHORT)
    engine.submit(second.job)
    engine.stop(60.0)
    with pytest.raises(EngineStoppedError):
        engine.submit(Recorder(SHORT).job)
    assert (second.outcome(), first.outcome()) == ("stopped", "complete")
    assert len(first.token_ids) == LONG.max_new_tokens


def test_the_end_of_the_grace_or_hurry_ends_the_running_job(start: Callable[[int], EngineThread]) -> None:
    for grace_s, hurry in ((0.0, False), (60.0, True)):
        engine = start(4)
        job = running(engine)
        engine.stop(grace_s)
        if hurry:
            engine.hurry()
        assert job.outcome() == "stopped"
        assert len(job.token_ids) < LONG.max_new_tokens


def test_jobs_that_run_together_get_the_answers_they_get_alone(
    target: Target, drafted: EagleModel, plain: EagleModel
) -> None:
    engine = EngineThread(EagleModel(target, drafted.head, drafted.tree, max_batch=3).engine, 16)
    engine.start()
    jobs = []
    for seed in range(8):  # of all lengths, so that they join and leave at any time
        params = SamplingParams(max_new_tokens=5 + 17 * seed % 60, temperature=seed % 3 * 0.5, seed=seed)
        jobs.append(Recorder(params, [seed + i for i in range(1, 5 + 30 * (seed % 2))]))
        engine.submit(jobs[-1].job)
    impatient = Recorder(LONG)
    engine.submit(impatient.job)
    together = 0
    while not all(job.done.wait(0.01) for job in jobs):
        together = max(together, engine.running)
    engine.cancel(impatient.job)
    engine.stop(10.0)
    engine.join()
    assert together > 1
    for job in jobs:
        assert job.outcome() == "complete"
        assert job.token_ids == plain.generate(job.job.prompt_ids, job.job.params).token_ids
