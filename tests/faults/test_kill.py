"""`kill -9` of real runs: whatever the moment, the same command again makes the undisturbed artifact."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from tests.faults.proxy import Hold, to
from tests.faults.runs import STAGES, Place, wait_until

KILLED = -9


def writing_s(place: Place, stage: str) -> float:
    """Seconds from the first change of the output to the end of an undisturbed run."""
    run = place.start(stage)
    wait_until(place.begun, run)
    begun = time.monotonic()
    assert run.wait().code == 0
    return time.monotonic() - begun


def kill_at_random_times(place: Place, stage: str, kills: int) -> None:
    random_time = random.Random(f"{place.root[:5]} {stage} {kills}")
    longest = writing_s(replace(place, root=f"{place.root}/timed"), stage)
    killed = 0
    for number in range(5 * kills):
        here = replace(place, root=f"{place.root}/{number}")
        here.proxy.heal()
        run = here.start(stage)
        wait_until(here.begun, run)
        time.sleep(random_time.uniform(0, longest))
        killed += run.kill().code == KILLED
        again = here.start(stage).wait()
        assert again.code == 0, again.err
        here.is_whole(stage)
        if killed == kills:
            return
    raise AssertionError(f"only {killed} of {kills} kills came before the end")


@pytest.mark.parametrize("stage", STAGES)
def test_runs_killed_at_random_times_end_as_if_undisturbed(place: Place, stage: str) -> None:
    kill_at_random_times(place, stage, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_runs_killed_at_twenty_random_times_end_as_if_undisturbed(place: Place, stage: str) -> None:
    kill_at_random_times(place, stage, 20)


def test_a_run_killed_again_and_again_gets_to_its_end(place: Place) -> None:
    ended, kills = None, 0
    random_time = random.Random(f"again {place.root[:5]}")
    longest = writing_s(replace(place, root=f"{place.root}/timed"), "gen-data")
    place.proxy.heal()
    while ended is None or ended.code == KILLED:
        run = place.start("gen-data")
        wait_until(place.begun, run)
        time.sleep(random_time.uniform(0, longest))
        ended = run.kill() if kills < 5 else run.wait()
        kills += 1
    assert ended.code == 0, ended.err
    place.is_whole("gen-data")


WRITES = ["/claim.json", "/state.json", "conversations-00001", "/shard-1.json", "manifest.json"]


@pytest.mark.parametrize(
    ("name", "late"),
    [*((name, True) for name in WRITES), ("conversations-00001", False), ("manifest.json", False)],
)
def test_a_run_killed_in_the_middle_of_an_upload_continues(gcs: Place, name: str, late: bool) -> None:
    """Killed before the store has the object (`late`), or before it has said so."""
    hold = Hold(late=late)
    gcs.proxy.fault(hold, to("upload", name))
    run = gcs.start("gen-data")
    assert hold.reached.wait(60), run.err()
    run.kill()
    again = gcs.start("gen-data").wait()
    assert again.code == 0, again.err
    gcs.is_whole("gen-data")


@pytest.mark.parametrize("name", WRITES[2:])
def test_an_upload_that_arrives_after_its_run_was_killed_and_replaced_does_no_harm(
    gcs: Place, name: str
) -> None:
    hold = Hold(late=True)
    gcs.proxy.fault(hold, to("upload", name))
    run = gcs.start("gen-data")
    assert hold.reached.wait(60), run.err()
    run.kill()
    second_hold = Hold(late=True)
    gcs.proxy.fault(second_hold, to("upload", "conversations-00003"))
    again = gcs.start("gen-data")
    if name != "manifest.json":
        assert second_hold.reached.wait(60), again.err()
    hold.let_go()
    second_hold.let_go()
    ended = again.wait()
    assert ended.code == 0, ended.err
    gcs.is_whole("gen-data")
