"""SIGTERM and Ctrl-C, kept until an optimizer step is done, so that it can be saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from stages.errors import EagleError


class StopSignal:
    """Use as a context manager. The first signal is only noted, the second one acts at once."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def received(self) -> bool:
        return self._number is not None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # A script's background jobs ignore Ctrl-C.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)

    def deliver(self) -> None:
        """Does what the signal would have done.

        Raises:
            EagleError: another process got it, and this one none.
            BaseException: whatever the handler before raises.
        """
        self.__exit__()
        if self._number is not None:
            signal.raise_signal(self._number)
        raise EagleError(
            "another process of this training was stopped: run the same command again to continue"
        )

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.__exit__()
        self._number = number
