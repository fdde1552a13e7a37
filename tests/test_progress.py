"""Progress goes to stderr, in the form that fits who reads it."""

from __future__ import annotations

import errno
import io
import re
import time

import pytest
from rich.console import Console

from stages.progress import Reporter


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_file_gets_a_line_every_ten_seconds_and_one_at_the_end() -> None:
    written, clock = io.StringIO(), Clock()
    reporter = Reporter(console=Console(file=written, width=200), clock=clock)
    with reporter.task("answers", total=100, unit="tok") as task:
        for _ in range(20):
            clock.now += 1.5
            task.advance(5)
            task.note("loss 1.23")
    assert written.getvalue().splitlines() == [
        "answers: 35/100 tok (35%), 3.3 tok/s, 0:20 left, loss 1.23",
        "answers: 70/100 tok (70%), 3.3 tok/s, 0:09 left, loss 1.23",
        "answers: 100 tok in 0:30 (3.3 tok/s), loss 1.23",
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_work_goes_on_where_its_progress_cannot_be_written(number: int) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, "cannot be written")

        def fileno(self) -> int:
            raise io.UnsupportedOperation

    reporter = Reporter(console=Console(file=Full(), width=200))
    reporter.log("before")
    with reporter.task("answers", total=1) as task:
        task.advance()
    assert task.done == 1


def test_what_an_earlier_run_did_counts_as_done_and_not_for_the_rate() -> None:
    written, clock = io.StringIO(), Clock()
    reporter = Reporter(console=Console(file=written, width=200), clock=clock)
    with reporter.task("rows", total=100, unit="rows", done=90) as task:
        clock.now = 10
        task.advance(5)
    assert written.getvalue().splitlines()[0] == "rows: 95/100 rows (95%), 0.50 rows/s, 0:10 left"


def test_a_task_that_fails_says_how_far_it_came() -> None:
    written = io.StringIO()
    reporter = Reporter(console=Console(file=written, width=200))

    def write_shards() -> None:
        with reporter.task("shards", total=7) as task:
            task.advance(3)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_shards()
    assert written.getvalue() == "shards: stopped at 3/7\n"


def test_a_terminal_gets_one_bar_a_task_and_logs_stay_whole() -> None:
    written = io.StringIO()
    reporter = Reporter(console=Console(file=written, width=120, force_terminal=True, color_system=None))
    with reporter.task("answers", total=4, unit="tok") as outer:
        outer.advance(4)
        with reporter.task("[inner]") as inner:
            inner.advance(2)
            reporter.log("a line [with brackets] " + "x" * 200)
    text = written.getvalue()
    assert "4/4 tok" in text
    assert "[inner]" in text
    assert "a line [with brackets] " + "x" * 200 in text


def test_the_rate_of_a_finished_bar_is_that_of_the_whole_task_in_this_run() -> None:
    written = io.StringIO()
    reporter = Reporter(console=Console(file=written, width=120, force_terminal=True, color_system=None))
    with reporter.task("rows", total=100, unit="rows", done=90) as task:
        time.sleep(0.2)
        task.advance(5)
        task.advance(5)
    last = re.findall(r"([\d.,]+) rows/s", written.getvalue())[-1]
    assert 0 < float(last.replace(",", "")) <= 50


def test_a_quiet_reporter_writes_nothing() -> None:
    written = io.StringIO()
    reporter = Reporter(quiet=True, console=Console(file=written, force_terminal=True))
    with reporter.task("answers", total=1) as task:
        task.advance()
        reporter.log("line")
    assert task.done == 1
    assert written.getvalue() == ""


def test_the_default_reporter_never_writes_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter()
    with reporter.task("answers", total=1) as task:
        task.advance()
    reporter.log("line")
    out, err = capfd.readouterr()
    assert out == ""
    assert "answers: 1 in 0:00" in err
    assert "line" in err
