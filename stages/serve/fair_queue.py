"""The jobs that wait: of one client in order of arrival, of several in turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar


class OfClient(Protocol):
    """Something that a client waits for.

    Attributes:
        client: who; equal for the same one.
    """

    client: str


J = TypeVar("J", bound=OfClient)


class FairQueue(Generic[J]):
    """A queue of which no client can have more than its share while others wait.

    The next job is one of a client with the fewest that run, and of several such clients of the one whose
    turn is the longest ago. A client that is alone may fill the queue. When it is full, another one may still
    wait with as many as its share of it, so that at most `limit` * (1 + 1/2 + 1/3 + ...) wait at all.

    Args:
        limit: jobs of a single client, and of all but those that come with less than their share.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._clients: OrderedDict[str, deque[J]] = OrderedDict()  # those whose turn is next come first

    def __len__(self) -> int:
        return sum(map(len, self._clients.values()))

    def __iter__(self) -> Iterator[J]:
        for jobs in self._clients.values():
            yield from jobs

    def add(self, *jobs: J) -> bool:
        """Puts jobs of one client behind its others; false, and none of them, where there is no room."""
        client = jobs[0].client
        waiting = self._clients.get(client, deque())
        others = len(self._clients) - (client in self._clients)
        share = self._limit // (others + 1)
        if len(self) + len(jobs) > self._limit and len(waiting) + len(jobs) > share:
            return False
        self._clients.setdefault(client, deque()).extend(jobs)
        return True

    def take(self, running: Mapping[str, int]) -> J:
        """The next job, of a queue that is not empty.

        Args:
            running: how many jobs of each client run; clients of none may be left out.
        """
        client = min(self._clients, key=lambda name: running.get(name, 0))  # the first of equal ones
        job = self._clients[client].popleft()
        self._clients.move_to_end(client)
        self._forget_if_done(client)
        return job

    def remove(self, job: J) -> bool:
        """Takes a job out; false where it does not wait."""
        waiting = self._clients.get(job.client, deque())
        if job not in waiting:
            return False
        waiting.remove(job)
        self._forget_if_done(job.client)
        return True

    def clear(self) -> None:
        """Takes all of them out."""
        self._clients.clear()

    def _forget_if_done(self, client: str) -> None:
        if not self._clients[client]:
            del self._clients[client]
