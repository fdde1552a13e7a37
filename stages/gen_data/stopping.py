"""Stopping between two shards: a termination signal lets the one under way be finished."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stages.progress import Reporter


class Stop:
    """Attributes: `asked`, whether a signal has arrived."""

    asked = False


@contextmanager
def stop_on_sigterm(report: Reporter) -> Iterator[Stop]:
    """Notes a first SIGTERM within the block; a second one acts as without this.

    Outside of the main thread, where Python delivers no signals, nothing is ever noted.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL  # none of Python's

    def note(number: int, frame: FrameType | None) -> None:
        stop.asked = True
        signal.signal(signal.SIGTERM, before)
        report.log("terminated: stopping behind the shard under way; a second signal stops at once")

    signal.signal(signal.SIGTERM, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
