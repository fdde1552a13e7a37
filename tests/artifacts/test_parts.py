from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from stages.artifacts import (
    Artifact,
    ArtifactWriter,
    Manifest,
    artifact_state,
    merge_parts,
    open_artifact,
    part_name,
    unfinished,
)
from stages.artifacts.folder import open_folder
from stages.errors import EagleError
from tests.artifacts.interruption import contents
from tests.artifacts.made import OTHER_TARGET, PARENT, TARGET, refusal, stored

SETTINGS: dict[str, Any] = {"config": {"seed": 0}, "parents": [PARENT], "target": TARGET}


def make_part(uri: str, number: int, of: int = 3, *, finish: bool = True, **changes: Any) -> Manifest | None:
    """Part `number`, with as many shards as its number; what was found finished."""
    settings = SETTINGS | changes
    config = settings.pop("config")
    with ArtifactWriter.open(uri, "features", config, part=(number, of), **settings) as writer:
        if writer.finished is not None:
            return writer.finished
        for shard in range(len(writer.committed), number):
            writer.add_shard(f"f-{shard}.bin", b"%d of part %d" % (shard, number), rows=number)
        writer.add_file("target/config.json", b"of part %d" % number)
        if finish:
            writer.finish({"rows": number**2})
    return None


def merge(uri: str, of: int = 3, files_from: int = 0, **changes: Any) -> Manifest:
    return merge_parts(
        uri,
        "features",
        number=of,
        counts=lambda counts: {"rows": sum(part["rows"] for part in counts)},
        files_from=files_from,
        **(SETTINGS | changes),
    )


def merged(uri: str) -> Artifact:
    for number in (2, 0, 1):
        make_part(uri, number)
    merge(uri)
    return open_artifact(uri, "features")


def test_parts_become_one_artifact_and_nothing_of_them_is_left_but_their_shards(place: str) -> None:
    artifact = merged(place)
    part = [part_name(number, 3) for number in range(3)]
    expected = [
        (f"{part[1]}/{stored('f-0.bin', b'0 of part 1')}", 1),
        (f"{part[2]}/{stored('f-0.bin', b'0 of part 2')}", 2),
        (f"{part[2]}/{stored('f-1.bin', b'1 of part 2')}", 2),
    ]
    assert [(shard.path, shard.rows) for shard in artifact.manifest.shards] == expected
    assert artifact.manifest.counts == {"rows": 5}
    assert artifact.manifest.target == TARGET
    assert artifact.read("target/config.json") == b"of part 0"
    assert [error for _, error in artifact.verify_all() if error] == []
    assert set(contents(place)) == {"manifest.json", "target/config.json", *(path for path, _ in expected)}


def test_merging_again_and_making_a_part_again_find_it_finished(place: str) -> None:
    manifest = merged(place).manifest
    before = contents(place)
    assert merge(place) == manifest
    assert make_part(place, 1) == manifest
    with ArtifactWriter.open(place, "features", **SETTINGS) as whole:
        assert whole.finished == manifest
    assert contents(place) == before


def test_files_come_from_the_part_that_is_named(tmp_path: Any) -> None:
    for number in range(3):
        make_part(str(tmp_path), number)
    merge(str(tmp_path), files_from=2)
    assert open_artifact(str(tmp_path), "features").read("target/config.json") == b"of part 2"


def test_parts_that_begin_at_once_all_come_to_be(place: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: make_part(place, number), range(3)))
    assert merge(place).counts == {"rows": 5}


def test_a_part_is_continued(place: str) -> None:
    make_part(place, 2, finish=False)
    assert artifact_state(place) == "partial"
    found = unfinished(place)
    assert found is not None
    assert found.run.parts == 3
    part = unfinished(f"{place}/{part_name(2, 3)}")
    assert part is not None
    assert len(part.shards) == 2
    assert "unfinished features artifact in 3 parts" in refusal(lambda: open_artifact(place, "features"))
    make_part(place, 2)
    assert open_artifact(f"{place}/{part_name(2, 3)}", "features").manifest.counts == {"rows": 4}


def test_missing_and_unfinished_parts_are_named_with_what_to_do(place: str) -> None:
    assert "has no parts to merge" in refusal(lambda: merge(place))
    make_part(place, 0)
    make_part(place, 2, finish=False)
    before = contents(place)
    line = refusal(lambda: merge(place))
    assert f"parts 1, 2 of 3 of {place} are not finished: run the same command with --shard-index 1" in line
    make_part(place, 2)
    assert "part 1 of 3 of" in refusal(lambda: merge(place))
    assert set(before) - set(contents(place)) == {name for name in before if "/_run" in name}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config": {"seed": 1}}, "(seed 0, now 1)"),
        ({"target": OTHER_TARGET}, "differs in chat_template"),
        ({"of": 4}, "is being made in 3 parts, not 4: use --num-shards 3, or --overwrite"),
    ],
)
@pytest.mark.parametrize("action", [lambda uri, **changes: make_part(uri, 1, **changes), merge])
def test_parts_of_another_run_or_number_are_refused(
    place: str, action: Callable[..., object], changes: dict[str, Any], says: str
) -> None:
    for number in range(3):
        make_part(place, number)
    before = contents(place)
    assert says in refusal(lambda: action(place, **changes))
    assert contents(place) == before


def test_a_whole_and_parts_do_not_mix(place: str) -> None:
    make_part(place, 1)
    line = refusal(lambda: ArtifactWriter.open(place, "features", **SETTINGS))
    assert "is being made in 3 parts: merge them with --num-shards 3" in line
    whole = f"{place}-whole"
    with ArtifactWriter.open(whole, "features", **SETTINGS) as writer:
        writer.add_shard("a", b"1", rows=1)
    assert "was begun as a whole, not in 3 parts" in refusal(lambda: make_part(whole, 1))


@pytest.mark.parametrize("finish", [True, False])
def test_overwrite_replaces_a_merged_artifact_and_unmerged_parts(place: str, finish: bool) -> None:
    if finish:
        merged(place)
    else:
        make_part(place, 1)
        make_part(place, 2, finish=False)
    with ArtifactWriter.open(place, "features", {"seed": 1}, overwrite=True) as writer:
        writer.add_shard("a", b"1", rows=1)
        writer.finish({})
    assert set(contents(place)) == {"manifest.json", stored("a", b"1")}


@pytest.mark.parametrize("finish", [True, False])
def test_parts_with_overwrite_replace_what_was_there_once_and_leave_each_other_alone(
    place: str, finish: bool
) -> None:
    if finish:
        merged(place)
    else:
        make_part(place, 1)
        make_part(place, 2, finish=False)
    for number in (1, 0):
        make_part(place, number, of=2, overwrite=True, config={"seed": 1})
    assert merge(place, of=2, config={"seed": 1}).counts == {"rows": 1}
    only = f"{part_name(1, 2)}/{stored('f-0.bin', b'0 of part 1')}"
    assert set(contents(place)) == {"manifest.json", "target/config.json", only}


def test_a_part_that_is_being_written_keeps_the_whole_from_being_replaced(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.artifacts.process.Process.is_this", lambda self: False)
    with ArtifactWriter.open(place, "features", part=(1, 3), **SETTINGS) as writer:
        before = contents(place)
        for settings in ({}, {"part": (0, 2)}):
            line = refusal(lambda: ArtifactWriter.open(place, "features", {}, overwrite=True, **settings))  # noqa: B023
            assert "is writing" in line
        assert before.keys() <= contents(place).keys()
        writer.finish({"rows": 1})


def test_a_shard_of_a_part_that_is_lost_is_named_when_merging(place: str) -> None:
    for number in range(3):
        make_part(place, number)
    lost = f"{part_name(2, 3)}/{stored('f-1.bin', b'1 of part 2')}"
    open_folder(place).remove(lost)
    with pytest.raises(EagleError, match=f"{lost} is missing"):
        merge(place)
    assert artifact_state(place) == "partial"
