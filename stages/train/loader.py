"""What each optimizer step takes, made ready while the step before it runs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from stages.features.layout import FeatureRow
from stages.train.batch import TttBatch

AHEAD = 2
"""Batches that are ready and wait to be taken, at most."""

_STOP_S = 10.0

StepRows = Sequence[Sequence[FeatureRow]]
"""The rows of each micro-batch of an optimizer step."""


class Loader:
    """Reads rows and makes the micro-batches of each step in a thread of its own; gives them in their order.

    Neither order nor numbers depend on the thread. Use as a context manager: leaving it stops the thread.

    Attributes:
        waited: seconds for which a batch was asked for and not ready.
    """

    def __init__(
        self,
        rows: Generator[StepRows, None, None],
        prepare: Callable[[Sequence[FeatureRow]], TttBatch],
        interrupt: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts nothing yet.

        Args:
            prepare: makes a batch of the rows of a micro-batch without keeping a view of them.
            interrupt: ends what `rows` waits for, so that the thread can stop.
            stopped: whether to wait no longer; iterating then ends.
        """
        self.waited = 0.0
        self._rows = rows
        self._prepare = prepare
        self._interrupt = interrupt
        self._asked_to_stop = stopped
        self._ready: queue.Queue[list[TttBatch] | BaseException | None] = queue.Queue(AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="eagle-loader", daemon=True)

    def __enter__(self) -> Loader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the thread, though not for ever: it may be in the middle of a request."""
        self._stopped.set()
        self._interrupt()
        self._thread.join(_STOP_S)

    def __iter__(self) -> Iterator[list[TttBatch]]:
        """Raises what reading raised, in place of the step that could not be read."""
        while True:
            asked = time.monotonic()
            item = self._take()
            self.waited += time.monotonic() - asked
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                # No name may hold the rows of the last batch: it would keep their window's shards.
                step = next(map(self._prepared, self._rows), None)
                self._put(step)
                if step is None:
                    break
            self._rows.close()
        except BaseException as error:
            self._put(error)

    def _prepared(self, rows: StepRows) -> list[TttBatch]:
        return [self._prepare(micro) for micro in rows]

    def _take(self) -> list[TttBatch] | BaseException | None:
        while not self._asked_to_stop():
            try:
                return self._ready.get(timeout=0.2)
            except queue.Empty:
                continue
        return None

    def _put(self, item: list[TttBatch] | BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return
