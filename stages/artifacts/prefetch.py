"""Fetching the files that are wanted next, in the background."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from stages.artifacts.cache import Held, cache_limit

_THREADS = 4


class Prefetch:
    """Files that are wanted next, fetched in order by a few threads and held until somebody takes them.

    Args:
        fetch: gets a file and holds it; called in the background, and by `take` for what was not wanted.
    """

    def __init__(self, fetch: Callable[[str], Held]) -> None:
        self._fetch = fetch
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._queue: deque[str] = deque()
        self._sizes: dict[str, int] = {}
        self._begun: dict[str, Future[Held]] = {}
        self._budget = 0
        self._threads = 0

    def want(self, paths: Sequence[str], sizes: Mapping[str, int]) -> None:
        """Fetches these and only these from now on; what is held and not among them is released."""
        budget = cache_limit() // 2 if paths else 0
        with self._of_this_process():
            self._budget = budget
            self._sizes = dict(sizes)
            for path in [path for path in self._begun if path not in sizes]:
                self._begun.pop(path).add_done_callback(_release)
            self._queue = deque(path for path in paths if path not in self._begun)
            self._changed.notify_all()
            for _ in range(min(_THREADS, len(self._queue)) - self._threads):
                self._threads += 1
                threading.Thread(target=self._work, name="eagle-prefetch", daemon=True).start()

    def wanted(self, path: str) -> bool:
        """Whether it is on the list and has not been taken."""
        with self._of_this_process():
            return path in self._begun or path in self._queue

    def close(self) -> None:
        """Fetches nothing more and releases what is held."""
        self.want((), {})

    def take(self, path: str) -> Held:
        """The file, waited for where its fetching has begun, else fetched now. The caller releases it."""
        with self._of_this_process():
            begun = self._begun.pop(path, None)
            if begun is None and path in self._queue:
                self._queue.remove(path)
            self._changed.notify_all()
        return self._fetch(path) if begun is None else begun.result()

    def _of_this_process(self) -> threading.Condition:
        """The lock; after a fork, whose child has none of the threads, of a list that begins anew."""
        if self._process != os.getpid():
            self._begin()
        return self._changed

    def _work(self) -> None:
        while (begun := self._next()) is not None:
            path, future = begun
            try:
                future.set_result(self._fetch(path))
            except BaseException as error:
                future.set_exception(error)

    def _next(self) -> tuple[str, Future[Held]] | None:
        """The next file to fetch, once there is room for it; None when there is nothing left to do."""
        with self._changed:
            while self._queue and not self._room_for(self._queue[0]):
                self._changed.wait()
            if not self._queue:
                self._threads -= 1
                return None
            path = self._queue.popleft()
            self._begun[path] = Future()
            return path, self._begun[path]

    def _room_for(self, path: str) -> bool:
        held = sum(self._sizes[begun] for begun in self._begun)
        return not held or held + self._sizes[path] <= self._budget


def _release(begun: Future[Held]) -> None:
    if begun.exception() is None:
        begun.result().release()
