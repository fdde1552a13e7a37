"""Whose turn it is, and who may wait."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from stages.serve.fair_queue import FairQueue

LIMIT, SLOTS = 6, 2


@dataclass(eq=False)
class Job:
    client: str
    number: int


steps = st.one_of(
    st.tuples(st.just("add"), st.sampled_from("abcd"), st.integers(1, LIMIT)),
    st.tuples(st.just("take"), st.just(""), st.just(0)),
    st.tuples(st.just("end"), st.just(""), st.integers(0, SLOTS - 1)),
    st.tuples(st.just("remove"), st.just(""), st.integers(0, 20)),
)


@given(st.lists(steps, max_size=60))
def test_every_client_gets_its_share_of_room_and_of_turns(steps: list[tuple[str, str, int]]) -> None:
    queue: FairQueue[Job] = FairQueue(LIMIT)
    waiting: dict[str, deque[Job]] = {}
    running: list[Job] = []
    numbers = 0
    for action, client, count in steps:
        if action == "add":
            jobs = [Job(client, numbers + i) for i in range(count)]
            numbers += count
            total = sum(map(len, waiting.values()))
            own = len(waiting.get(client, ()))
            others = sum(1 for name, jobs_of in waiting.items() if jobs_of and name != client)
            fits = total + count <= LIMIT or own + count <= LIMIT // (others + 1)
            assert queue.add(*jobs) == fits
            if fits:
                waiting.setdefault(client, deque()).extend(jobs)
        elif action == "take" and len(queue) and len(running) < SLOTS:
            counts = Counter(job.client for job in running)
            job = queue.take(counts)
            assert job is waiting[job.client].popleft(), "in order of arrival"
            assert counts[job.client] == min(
                counts[name] for name, jobs in waiting.items() if jobs or name == job.client
            )
            running.append(job)
        elif action == "end" and count < len(running):
            running.pop(count)
        elif action == "remove" and (everything := list(queue)):
            job = everything[count % len(everything)]
            assert queue.remove(job)
            assert not queue.remove(job)
            waiting[job.client].remove(job)
        assert len(queue) == sum(map(len, waiting.values()))
        assert len(queue) <= LIMIT * (1 + 1 / 2 + 1 / 3 + 1 / 4)
        assert sorted(job.number for job in queue) == sorted(
            j.number for jobs in waiting.values() for j in jobs
        )


def test_clients_take_turns_where_none_of_them_runs() -> None:
    queue: FairQueue[Job] = FairQueue(12)
    for client, count in (("a", 4), ("b", 2), ("c", 1)):
        queue.add(*(Job(client, i) for i in range(count)))
    assert "".join(queue.take({}).client for _ in range(7)) == "abcabaa"
