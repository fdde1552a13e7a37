"""`kill -9` of real runs: whatever the moment, the same command again makes the undisturbed artifact."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from tests.faults.proxy import Hold, since, to
from tests.faults.runs import STAGES, Place, comparable, wait_until

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


def test_a_run_killed_again_and_again_gets_to_its_end(gcs: Place) -> None:
    ended, kills = None, 0
    random_time = random.Random(0)
    longest = writing_s(replace(gcs, root=f"{gcs.root}/timed"), "gen-data")
    while ended is None or ended.code == KILLED:
        gcs.proxy.heal()
        run = gcs.start("gen-data")
        wait_until(lambda: gcs.begun() or not run.running(), run)  # noqa: B023
        time.sleep(random_time.uniform(0, longest))
        ended = run.kill() if kills < 5 else run.wait()
        kills += 1
    assert ended.code == 0, ended.err
    gcs.is_whole("gen-data")


def test_training_that_is_killed_ends_with_the_head_of_one_that_was_not(gcs: Place) -> None:
    flags = ("--epochs", "40", "--checkpoint-seconds", "0")
    features = gcs.copy(gcs.runs.features)
    undisturbed = replace(gcs, root=f"{gcs.root}/undisturbed")
    ended = undisturbed.start("train", *flags, features=features).wait()
    assert ended.code == 0, ended.err
    for name, after, late in [
        ("/checkpoint", 0, True),
        ("/checkpoint", 1, False),
        ("/checkpoint", 0, True),
        ("/model.", 0, False),
    ]:
        gcs.proxy.heal()
        hold = Hold(late=late)
        gcs.proxy.fault(hold, to("upload", f"/output{name}"), after=after)
        run = gcs.start("train", *flags, features=features)
        wait_until(hold.reached.is_set, run)
        run.kill()
    ended = gcs.start("train", *flags, features=features).wait()
    assert ended.code == 0, ended.err
    found, whole = gcs.contents(), undisturbed.contents()
    assert found.keys() == whole.keys()
    for name in ("model.safetensors", "config.json"):
        assert found[name] == whole[name]


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


def test_a_job_array_whose_jobs_are_killed_makes_what_one_without_kills_makes(gcs: Place) -> None:
    part = [("--num-shards", "2", "--shard-index", index) for index in "01"]
    join = ("--num-shards", "2")
    undisturbed = replace(gcs, root=f"{gcs.root}/undisturbed")
    for flags in (*part, join):
        ended = undisturbed.start("gen-data", *flags).wait()
        assert ended.code == 0, ended.err

    hold = Hold(late=True)
    gcs.proxy.fault(hold, to("upload", "/output/part-00001-of-00002/conversations-00001"))
    jobs = [gcs.start("gen-data", *flags) for flags in part]
    assert hold.reached.wait(60), jobs[1].err()
    jobs[1].kill()
    assert jobs[0].wait().code == 0
    assert "--shard-index 1" in gcs.start("gen-data", *join).wait().error
    hold.let_go()
    assert gcs.start("gen-data", *part[1]).wait().code == 0

    for after in (0, 1):
        held = Hold(late=False)
        gcs.proxy.fault(held, since(to("upload", "/output/manifest.json")), after=after)
        joining = gcs.start("gen-data", *join)
        assert held.reached.wait(60), joining.err()
        joining.kill()
    ended = gcs.start("gen-data", *join).wait()
    assert ended.code == 0, ended.err
    assert comparable(gcs.contents()) == comparable(undisturbed.contents())
