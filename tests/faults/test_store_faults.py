"""What stores and networks do wrong: a little of it is not noticed, much of it is one line and a rerun."""

from __future__ import annotations

import os
import random
from datetime import timedelta

import pytest

from stages.artifacts import ArtifactWriter
from tests.faults.proxy import (
    Answer,
    Deed,
    Hold,
    Match,
    Request,
    Send,
    answers,
    breaks_after,
    breaks_before,
    breaks_within,
    bucket_gone,
    cuts_answer,
    flips_answer,
    flips_upload,
    lists_nothing,
    running_proxy,
    shortens_answer,
    since,
    to,
)
from tests.faults.runs import Place, comparable, wait_until

SLOWER = [breaks_before, answers(503), answers(410)]
FEW: dict[str, list[tuple[Deed, Match]]] = {
    "the store is busy": [
        (answers(503), to("upload", "output/features-00001")),
        (answers(429), to("read", "gen-data/manifest.json")),
        (answers(502), to("upload", "output/manifest.json")),
    ],
    "connections break": [
        (breaks_before, to("upload", "output/features-00000")),
        (breaks_within, to("upload", "output/features-00001")),
        (breaks_after, to("upload", "output/manifest.json")),
        (cuts_answer, to("read", "gen-data/conversations-00002")),
    ],
}


@pytest.mark.parametrize("few", FEW)
def test_a_few_errors_of_the_store_are_not_noticed(gcs: Place, few: str) -> None:
    conversations = gcs.copy(gcs.runs.conversations)
    done = [gcs.proxy.fault(deed, match) for deed, match in FEW[few]]
    ended = gcs.start("extract-features", conversations=conversations).wait(120)
    assert ended.code == 0, ended.err
    assert [fault.done for fault in done] == [1] * len(done)
    assert ended.err == ""
    gcs.is_whole("extract-features")


def test_an_exclusive_upload_whose_answer_is_lost_is_still_ones_own(gcs: Place) -> None:
    lost = gcs.proxy.fault(breaks_after, lambda request: request.action == "upload" and request.exclusive)
    ended = gcs.start("gen-data").wait()
    assert lost.done == 1
    assert ended.code == 0, ended.err
    gcs.is_whole("gen-data")


@pytest.mark.parametrize(
    "deed", [breaks_within, breaks_after, *(pytest.param(deed, marks=pytest.mark.slow) for deed in SLOWER)]
)
def test_an_upload_in_parts_survives_what_happens_to_one_of_them(
    gcs: Place, deed: Deed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in gcs.env.items():
        monkeypatch.setenv(name, value)
    data = os.urandom(1 << 20) * 53  # gcsfs sends 50 MB at a time
    fault = gcs.proxy.fault(deed, to("part"), after=1)
    with ArtifactWriter.open(gcs.output, "features", {}) as writer:
        shard = writer.add_shard("a.bin", data, rows=1)
        writer.finish({})
    assert fault.done == 1
    stored = gcs.contents()
    assert stored.pop(shard.path) == data
    assert stored.keys() == {"manifest.json"}
    gcs.server.remove("bucket", f"{gcs.output}/{shard.path}".removeprefix("gs://bucket/"))  # 53 MB of memory


@pytest.mark.slow
def test_a_request_that_is_never_answered_is_sent_again(gcs: Place) -> None:
    forgotten = gcs.proxy.fault(Hold(late=False), to("upload", "conversations-00001"))
    ended = gcs.start("gen-data").wait(200)
    assert forgotten.done == 1
    assert ended.code == 0, ended.err
    gcs.is_whole("gen-data")


@pytest.mark.slow
def test_a_store_that_stays_busy_is_one_line_and_the_same_command_continues(gcs: Place) -> None:
    gcs.env["EAGLE_RETRY_S"] = "1"  # besides the half minute for which gcsfs tries by itself
    gcs.proxy.fault(answers(503), to("upload"), after=12, times=None)
    ended = gcs.start("extract-features").wait(240)
    assert gcs.output in ended.error
    assert "503" in ended.error
    gcs.proxy.heal()
    assert gcs.start("extract-features").wait().code == 0
    gcs.is_whole("extract-features")


@pytest.mark.slow
def test_a_network_that_goes_away_in_mid_run_is_one_line_and_the_same_command_continues(gcs: Place) -> None:
    with running_proxy(gcs.server.url) as own:
        gcs.env.update(STORAGE_EMULATOR_HOST=own.url, EAGLE_RETRY_S="1")
        own.fault(breaks_before, after=20, times=None)
        ended = gcs.start("extract-features").wait(240)
        assert gcs.output in ended.error
    refused = gcs.start("extract-features").wait(60)  # nothing listens there now
    assert gcs.output in refused.error
    assert refused.seconds < 20
    gcs.env["STORAGE_EMULATOR_HOST"] = gcs.proxy.url
    assert gcs.start("extract-features").wait().code == 0
    gcs.is_whole("extract-features")


@pytest.mark.parametrize("name", ["conversations-00002", "manifest.json"])
def test_a_bucket_that_is_gone_in_mid_run_is_one_line_and_the_same_command_continues(
    gcs: Place, name: str
) -> None:
    gcs.proxy.fault(bucket_gone, since(to("upload", name)), times=None)
    ended = gcs.start("gen-data").wait()
    assert f"bucket bucket of {gcs.output}/" in ended.error
    assert "does not exist" in ended.error
    assert ended.seconds < 10
    gcs.proxy.heal()
    assert gcs.start("gen-data").wait().code == 0
    gcs.is_whole("gen-data")
    assert not gcs.seen(to("upload", "conversations-00001")), "a committed shard was made again"


@pytest.mark.parametrize("name", ["features-00001", "/shard-1.json", "manifest.json"])
def test_a_bit_that_changes_on_the_way_up_never_counts(gcs: Place, name: str) -> None:
    flipped = gcs.proxy.fault(flips_upload, to("upload", name))
    ended = gcs.start("extract-features").wait()
    assert ended.code == 0, ended.err
    assert flipped.done == 1
    gcs.is_whole("extract-features")


@pytest.mark.parametrize("deed", [flips_answer, shortens_answer])
def test_bytes_that_change_on_the_way_down_are_not_taken(gcs: Place, deed: Deed) -> None:
    conversations = gcs.copy(gcs.runs.conversations)
    changed = gcs.proxy.fault(deed, to("read", "gen-data/conversations-00001"))
    ended = gcs.start("extract-features", conversations=conversations).wait()
    assert ended.code == 0, ended.err
    assert changed.done == 1
    gcs.is_whole("extract-features")


def test_no_listing_decides_anything(gcs: Place) -> None:
    conversations = gcs.copy(gcs.runs.conversations)
    gcs.proxy.fault(answers(503), to("upload", "/shard-2.json"), times=None)
    interrupted = gcs.start("extract-features", conversations=conversations)
    wait_until(lambda: gcs.seen(to("upload", "/shard-2.json")), interrupted)
    interrupted.kill()
    gcs.proxy.heal()
    gcs.proxy.fault(lists_nothing, to("list"), times=None)
    ended = gcs.start("extract-features", conversations=conversations).wait()
    assert ended.code == 0, ended.err
    assert not gcs.seen(to("upload", "features-00000")), "a committed shard was made again"
    found, whole = comparable(gcs.contents()), gcs.runs.whole["extract-features"]
    assert {name: found[name] for name in whole} == whole
    assert all(name.startswith("_run/") for name in found.keys() - whole.keys())  # litter that no reader sees
    gcs.proxy.heal()
    assert gcs.start("extract-features", conversations=conversations).wait().code == 0
    gcs.is_whole("extract-features")


@pytest.mark.parametrize("hours", [-9, 9])
def test_a_store_whose_clock_is_wrong_is_no_matter(gcs: Place, hours: int) -> None:
    gcs.proxy.clock_shift = timedelta(hours=hours)
    interrupted = gcs.start("gen-data")
    wait_until(lambda: gcs.seen(to("upload", "/shard-1.json")), interrupted)
    interrupted.kill()
    ended = gcs.start("gen-data").wait()
    assert ended.code == 0, ended.err
    uploads = [request.name for request in gcs.proxy.requests if request.action == "upload"]
    assert sum("conversations-00000" in name for name in uploads) == 1
    gcs.is_whole("gen-data")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_bad_network_costs_time_and_nothing_else(gcs: Place, seed: int) -> None:
    """One request in fifteen goes wrong, in a way drawn at random."""
    conversations = gcs.copy(gcs.runs.conversations)
    draw = random.Random(seed)
    ways = [answers(429), answers(503), breaks_before, breaks_within, breaks_after, cuts_answer]

    def goes_wrong(request: Request, send: Send) -> Answer:
        way = draw.choice(ways[:-1] if request.method == "POST" else [*ways[:3], ways[-1]])
        return way(request, send)

    fault = gcs.proxy.fault(goes_wrong, lambda request: draw.random() < 1 / 15, times=None)
    ended = gcs.start("extract-features", conversations=conversations).wait(240)
    assert ended.code == 0, ended.err
    assert fault.done > 1
    gcs.is_whole("extract-features")
