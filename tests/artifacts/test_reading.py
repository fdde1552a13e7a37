"""What readers refuse, and how much of an artifact they compare."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from stages.artifacts import (
    Artifact,
    ArtifactWriter,
    Shard,
    cache_folder,
    open_artifact,
)
from stages.artifacts.folder import open_folder
from stages.errors import EagleError
from tests.artifacts.interruption import CONFIG, contents
from tests.artifacts.made import OTHER_TARGET, PART, TARGET, finished, put, refusal


def test_an_unfinished_artifact_is_none(place: str) -> None:
    assert "does not exist: check the path, or make it with eagle extract-features" in refusal(
        lambda: open_artifact(place, "features")
    )
    with ArtifactWriter.open(place, "features", {}) as writer:
        writer.add_shard("a", b"1", rows=1)
    assert "unfinished features artifact: run the eagle extract-features" in refusal(
        lambda: open_artifact(place, "features")
    )


def test_another_kind_is_refused(place: str) -> None:
    finished(place)
    assert "is a features artifact where head is needed: give one that eagle train made" in refusal(
        lambda: open_artifact(place, "head")
    )


def test_a_truncated_or_missing_file_is_refused_on_opening(place: str) -> None:
    opened = finished(place)
    put(place, PART, b"01234")
    line = refusal(lambda: open_artifact(place, "features", verify="off"))
    assert f"{place}/{PART} is truncated (5 of 10 bytes)" in line
    assert "is truncated" in refusal(lambda: opened.read_range(PART, 2, 8))
    open_folder(place).remove(PART)
    missing = f"{PART} is missing"
    assert missing in refusal(lambda: open_artifact(place, "features", verify="off"))
    assert missing in refusal(lambda: opened.read(PART))
    assert missing in refusal(lambda: opened.read_range(PART, 2, 8))
    assert missing in refusal(lambda: opened.local(PART))


def test_changed_content_is_refused_on_reading(place: str) -> None:
    finished(place)
    put(place, PART, b"012345678X")
    artifact = open_artifact(place, "features")
    assert "does not match its digest" in refusal(lambda: artifact.read(PART))
    assert "does not match its digest" in refusal(lambda: artifact.local(PART))
    if place.startswith(("memory", "gs")):
        assert not list((cache_folder() / "artifacts/files").iterdir())


def many(uri: str) -> Artifact:
    with ArtifactWriter.open(uri, "features", CONFIG) as writer:
        for number in range(40):
            writer.add_shard(f"{number}.bin", b"shard %d" % number, rows=1)
        writer.add_file("config.json", b"{}")
        writer.finish({})
    return open_artifact(uri, "features")


def flip(uri: str, shard: Shard) -> None:
    put(uri, shard.path, b"X" * shard.bytes)


def refused(artifact: Artifact) -> list[str]:
    """The shards that are refused when all are read, in whichever way."""
    lines = {}
    for shard in artifact.manifest.shards:
        for read in (artifact.read, artifact.local):
            try:
                read(shard.path)
            except EagleError as error:
                lines[shard.path] = str(error)
    assert all("does not match its digest" in line for line in lines.values())
    return sorted(lines)


def test_how_much_is_compared_is_chosen_on_opening(place: str) -> None:
    shards = many(place).manifest.shards
    for shard in shards:
        flip(place, shard)
    assert refused(open_artifact(place, "features")) == sorted(shard.path for shard in shards)
    sampled = refused(open_artifact(place, "features", "sample"))
    assert len(sampled) in (2, 3)  # one in 16 of 41 files, one of which may be the file beside the shards
    assert refused(open_artifact(place, "features", "sample")) == sampled
    assert refused(open_artifact(place, "features", "off")) == []


def test_a_sample_is_at_least_one_file(place: str) -> None:
    finished(place)
    put(place, PART, b"X" * 10)
    put(place, "target/config.json", b"XX")
    artifact = open_artifact(place, "features", "sample")
    wrong = 0
    for path in (PART, "target/config.json"):
        with suppress(EagleError):
            artifact.read(path)
            continue
        wrong += 1
    assert wrong == 1


def test_every_fault_is_found_by_reading_everything(place: str) -> None:
    shards = many(place).manifest.shards
    flip(place, shards[3])
    artifact = open_artifact(place, None, "off")
    put(place, shards[5].path, b"x")
    open_folder(place).remove(shards[7].path)
    found = list(artifact.verify_all())
    assert [entry for entry, _ in found] == [*shards, *artifact.manifest.files]
    wrong = {entry.path: error for entry, error in found if error}
    assert list(wrong) == [shards[number].path for number in (3, 5, 7)]
    for error, says in zip(wrong.values(), ["does not match", "is truncated", "is missing"], strict=True):
        assert says in error


def test_any_kind_is_opened_where_any_will_do(place: str) -> None:
    put(place, "notes.txt", b"x")
    assert "is not an artifact, it has no manifest.json: check the path" in refusal(
        lambda: open_artifact(place, None)
    )
    open_folder(place).remove("notes.txt")
    finished(place, "head")
    assert open_artifact(place, None).manifest.kind == "head"


def test_an_older_schema_is_read(place: str) -> None:
    finished(place)
    manifest = json.loads(contents(place)["manifest.json"]) | {"schema_version": 1}
    put(place, "manifest.json", json.dumps(manifest).encode())
    assert open_artifact(place, "features").read(PART) == b"0123456789"


def test_a_file_that_the_manifest_lacks_is_refused(place: str) -> None:
    artifact = finished(place)
    assert "has no file nosuch" in refusal(lambda: artifact.read("nosuch"))
    assert "has no file nosuch" in refusal(lambda: artifact.local("nosuch"))


def test_another_target_is_refused_by_the_parts_that_differ(tmp_path: Path) -> None:
    artifact = finished(str(tmp_path / "x"))
    artifact.require_target(TARGET)
    line = refusal(lambda: artifact.require_target(OTHER_TARGET, "--target"))
    assert "was made for a, and --target b differs in chat_template:" in line
    artifact.require_target(TARGET.model_copy(update={"dtype": "float32"}), ignore=["dtype"])
