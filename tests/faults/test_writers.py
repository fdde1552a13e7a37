"""Two runs on one output: one of them stops with a line that says why, and what comes out is whole."""

from __future__ import annotations

import signal

import pytest

from tests.faults.proxy import Hold, to
from tests.faults.runs import Place, wait_until


def test_a_second_run_on_this_host_is_refused_while_the_first_lives(gcs: Place) -> None:
    hold = Hold(late=True)
    gcs.proxy.fault(hold, to("upload", "conversations-00001"))
    first = gcs.start("gen-data")
    assert hold.reached.wait(60), first.err()
    second = gcs.start("gen-data").wait()
    assert f"pid {first.pid}" in second.error
    assert gcs.output in second.error
    hold.let_go()
    assert first.wait().code == 0
    gcs.is_whole("gen-data")


def test_of_runs_that_start_at_once_one_makes_the_artifact(place: Place) -> None:
    runs = [place.start("gen-data") for _ in range(3)]
    ended = [run.wait() for run in runs]
    assert any(one.code == 0 for one in ended)
    for one in ended:
        assert one.code == 0 or place.output in one.error
    place.is_whole("gen-data")


@pytest.mark.slow
def test_a_stopped_run_of_another_host_is_taken_over_and_notices(gcs: Place) -> None:
    """The first stands still as a suspended machine does, loses its output, and wakes up again."""
    if not gcs.runs.eagle.namespaces:
        pytest.skip("no namespaces here")
    first = gcs.start("gen-data", host="elsewhere")
    wait_until(lambda: gcs.seen(to("upload", "/shard-1.json")), first)
    first.signal(signal.SIGSTOP)
    second = gcs.start("gen-data").wait(120)
    assert second.code == 0, second.err
    gcs.is_whole("gen-data")
    first.signal(signal.SIGCONT)
    ended = first.wait()
    assert ended.code == 0 or gcs.output in ended.error
    gcs.is_whole("gen-data")


def test_a_running_run_of_another_host_is_left_alone(gcs: Place) -> None:
    hold = Hold(late=True)
    gcs.proxy.fault(hold, to("upload", "conversations-00001"))
    if not gcs.runs.eagle.namespaces:
        pytest.skip("no namespaces here")
    first = gcs.start("gen-data", host="elsewhere")
    assert hold.reached.wait(60), first.err()
    second = gcs.start("gen-data").wait(120)
    assert "elsewhere" in second.error
    hold.let_go()
    assert first.wait().code == 0
    gcs.is_whole("gen-data")
