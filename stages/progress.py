"""Progress on stderr, never stdout: bars on a terminal, a line every ten seconds elsewhere, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.progress import Task as BarState
from rich.text import Text

LINE_EVERY_S = 10.0
SPEED_WINDOW_S = 120.0
LOG_WIDTH = 1000


@dataclass
class Task:
    """One piece of work under way: how much is done, of how much, and what there is to say about it.

    Attributes:
        total: units in all, None when unknown. May be set while the work runs.
        done: units done, with those that an earlier run did.
    """

    description: str
    total: float | None
    unit: str
    done: float
    remark: str
    show: Callable[[Task], None]

    def advance(self, count: float = 1) -> None:
        """Counts `count` more units as done."""
        self.done += count
        self.show(self)

    def note(self, text: str) -> None:
        """Shows `text` beside the progress, in place of the last note."""
        self.remark = text
        self.show(self)


class Reporter:
    """Shows a stage's progress and messages on stderr.

    A terminal gets bars with rate and remaining time; a file or a pipe gets a plain line for each task about
    every ten seconds and one at its end; a quiet reporter shows nothing at all.
    """

    def __init__(
        self,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quiet = quiet
        self._console = console if console is not None else _stderr_console()
        self._clock = clock
        self._bars: Progress | None = None
        self._running = 0

    def log(self, line: str) -> None:
        """Prints one line, above the bars if there are any."""
        if self._quiet:
            return
        try:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        except (OSError, SystemExit):  # a log file's disk is full, a pipe is not read: the work goes on
            self._quiet = True

    @contextmanager
    def task(
        self, description: str, total: float | None = None, unit: str = "", done: float = 0
    ) -> Iterator[Task]:
        """Shows a piece of work for as long as the block lasts.

        Args:
            description: what is being made, such as "answers".
            total: units in all, None when unknown.
            unit: what is counted, such as "tok".
            done: units that an earlier run has done; they count for the percentage and not for the rate.
        """
        if self._quiet:
            yield Task(description, total, unit, done, "", lambda task: None)
        elif self._console.is_terminal and not self._console.is_dumb_terminal:
            with self._bar(description, total, unit, done) as task:
                yield task
        else:
            with self._lines(description, total, unit, done) as task:
                yield task

    @contextmanager
    def _bar(self, description: str, total: float | None, unit: str, done: float) -> Iterator[Task]:
        bars = self._bars = self._bars or Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            _AmountColumn(),
            _RateColumn(),
            _RemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False, style="dim"),
            console=self._console,
            speed_estimate_period=SPEED_WINDOW_S,
            redirect_stdout=False,
        )
        bar: TaskID = bars.add_task(
            description, total=total, completed=int(done), unit=unit, note="", before=done
        )
        task = Task(
            description,
            total,
            unit,
            done,
            "",
            lambda task: bars.update(bar, total=task.total, completed=task.done, note=task.remark),
        )
        self._running += 1
        bars.start()
        try:
            yield task
            if task.total is None:
                bars.update(bar, total=task.done)
        finally:
            bars.stop_task(bar)
            self._running -= 1
            if self._running == 0:
                bars.stop()
                self._bars = None

    @contextmanager
    def _lines(self, description: str, total: float | None, unit: str, done: float) -> Iterator[Task]:
        start = last = self._clock()

        def show(task: Task) -> None:
            nonlocal last
            now = self._clock()
            if now - last >= LINE_EVERY_S:
                last = now
                self.log(_progress_line(task, task.done - done, now - start))

        task = Task(description, total, unit, done, "", show)
        try:
            yield task
        except BaseException:
            self.log(f"{description}: stopped at {_amount(task.done, task.total, unit)}")
            raise
        self.log(_end_line(task, task.done - done, self._clock() - start))


class _AmountColumn(ProgressColumn):
    """`120/700 tok`."""

    def render(self, task: BarState) -> Text:
        return Text(_amount(task.completed, task.total, task.fields["unit"]))


class _RateColumn(ProgressColumn):
    """`12.3 tok/s`, over the last two minutes; over the whole task once it is done."""

    def render(self, task: BarState) -> Text:
        speed = task.speed
        if task.finished and task.finished_time:
            speed = (task.completed - task.fields["before"]) / task.finished_time
        return Text(_rate(speed, task.fields["unit"]) if speed else "", style="cyan")


class _RemainingColumn(ProgressColumn):
    """`1:20 left`; the time taken once the task is done."""

    def render(self, task: BarState) -> Text:
        if task.finished or task.total is None:
            return Text(f"in {duration(task.elapsed or 0.0)}")
        remaining = task.time_remaining
        return Text(f"{duration(remaining)} left" if remaining is not None else "")


def _stderr_console() -> Console:
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=LOG_WIDTH)


def _progress_line(task: Task, new: float, seconds: float) -> str:
    parts = [_amount(task.done, task.total, task.unit)]
    if task.total:
        parts[0] += f" ({task.done / task.total:.0%})"
    if new > 0 and seconds > 0:
        parts.append(_rate(new / seconds, task.unit))
        if task.total is not None and task.total >= task.done:
            parts.append(f"{duration((task.total - task.done) * seconds / new)} left")
    if task.remark:
        parts.append(task.remark)
    return f"{task.description}: {', '.join(parts)}"


def _end_line(task: Task, new: float, seconds: float) -> str:
    line = f"{task.description}: {_amount(task.done, None, task.unit)} in {duration(seconds)}"
    if new > 0 and seconds >= 1:
        line += f" ({_rate(new / seconds, task.unit)})"
    return f"{line}, {task.remark}" if task.remark else line


def _amount(done: float, total: float | None, unit: str) -> str:
    of = f"/{total:,.0f}" if total is not None else ""
    return f"{done:,.0f}{of} {unit}".rstrip()


def _rate(per_second: float, unit: str) -> str:
    digits = 0 if per_second >= 100 else 1 if per_second >= 1 else 2
    return f"{per_second:,.{digits}f} {unit}".rstrip() + "/s"


def duration(seconds: float) -> str:
    """`1:05`, or `2:01:05` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
