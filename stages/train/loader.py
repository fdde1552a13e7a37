"""Batches that are made ready while the optimizer step before them runs."""

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


class Loader:
    """Reads rows and makes batches of them in a thread of its own; gives them in their order.

    Neither order nor numbers depend on the thread. Use as a context manager: leaving it stops the thread.

    Attributes:
        waited: seconds for which a batch was asked for and not ready.
    """

    def __init__(
        self,
        rows: Generator[Sequence[FeatureRow], None, None],
        prepare: Callable[[Sequence[FeatureRow]], TttBatch],
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts nothing yet.

        Args:
            prepare: makes a batch of one item of `rows` without keeping a view of it.
            interrupt: ends what `rows` waits for, so that the thread can stop.
        """
        self.waited = 0.0
        self._rows = rows
        self._prepare = prepare
        self._interrupt = interrupt
        self._ready: queue.Queue[TttBatch | BaseException | None] = queue.Queue(AHEAD)
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

    def __iter__(self) -> Iterator[TttBatch]:
        """Raises what reading raised, in place of the batch that could not be read."""
        while True:
            asked = time.monotonic()
            item = self._ready.get()
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
                batch = next(map(self._prepare, self._rows), None)
                self._put(batch)
                if batch is None:
                    break
            self._rows.close()
        except BaseException as error:
            self._put(error)

    def _put(self, item: TttBatch | BaseException | None) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return
