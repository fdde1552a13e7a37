"""What is written is what is read, and what writers find in their place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import (
    ArtifactWriter,
    Parent,
    artifact_state,
    join,
    open_artifact,
)
from tests.artifacts.interruption import CONFIG, contents
from tests.artifacts.made import OTHER_TARGET, PARENT, PART, TARGET, finished, put, refusal, stored


def test_an_artifact_reads_back_what_was_written(place: str, tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_bytes(b"\x00big" * 100)
    assert artifact_state(place) == "missing"
    with ArtifactWriter.open(place, "features", {"seed": 0}, parents=[PARENT], target=TARGET) as writer:
        assert writer.finished is None
        assert writer.committed == ()
        writer.add_shard("part-0.bin", b"0123456789", rows=2)
        writer.add_shard("part-1.bin", tmp_path / "big.bin", rows=1)
        writer.add_file("target/config.json", b"{}")
        writer.add_file("target/config.json", b'{"a": 1}')
        assert artifact_state(place) == "partial"
        written = writer.finish({"rows": 3})
    assert artifact_state(place) == "complete"
    artifact = open_artifact(place, "features")
    assert artifact.manifest == written == writer.finished
    assert [(shard.path, shard.rows, shard.bytes) for shard in written.shards] == [
        (PART, 2, 10),
        (stored("part-1.bin", b"\x00big" * 100), 1, 400),
    ]
    assert artifact.read(written.shards[1].path) == b"\x00big" * 100
    assert artifact.read("target/config.json") == b'{"a": 1}'
    assert artifact.local(PART).read_bytes() == b"0123456789"
    assert (artifact.local("target") / "config.json").read_bytes() == b'{"a": 1}'
    assert (artifact.local(".") / "target" / "config.json").exists()
    assert artifact.parent() == Parent(uri=place, kind="features", digest=written.digest)


def test_a_finished_artifact_holds_what_its_manifest_lists_and_nothing_else(place: str) -> None:
    finished(place)
    assert set(contents(place)) == {"manifest.json", PART, "target/config.json"}


def test_a_file_url_and_a_relative_path_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finished("runs/x")
    assert open_artifact(f"file://{tmp_path}/runs/x", "features").local(PART) == (tmp_path / "runs/x" / PART)


def test_large_objects_go_up_in_parts_and_come_back(place: str, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 6
    (tmp_path / "big.bin").write_bytes(data)
    with ArtifactWriter.open(place, "features", {}) as writer:
        writer.add_shard("big.bin", tmp_path / "big.bin", rows=1)
        name = writer.finish({}).shards[0].path
    assert open_artifact(place, "features").local(name).read_bytes() == data


@pytest.mark.parametrize("name", ["../x", "/x", "_run.json", "manifest.json"])
def test_names_outside_the_artifact_are_no_files(name: str, tmp_path: Path) -> None:
    with ArtifactWriter.open(str(tmp_path / "x"), "features", {}) as writer:
        with pytest.raises(ValueError, match=r"name|path"):
            writer.add_shard(name, b"", rows=0)
        with pytest.raises(ValueError, match=r"name|path"):
            writer.add_file(name, b"")


def test_a_shard_is_written_once(tmp_path: Path) -> None:
    with ArtifactWriter.open(str(tmp_path / "x"), "features", {}) as writer:
        writer.add_shard("a", b"1", rows=1)
        with pytest.raises(ValueError, match="already"):
            writer.add_shard("a", b"2", rows=1)
        with pytest.raises(ValueError, match="is a shard"):
            writer.add_file("a", b"2")
        writer.finish({})
        with pytest.raises(RuntimeError, match="finished"):
            writer.add_file("b", b"")


def test_the_same_command_again_finds_the_finished_artifact(place: str) -> None:
    first = finished(place).manifest
    moved = PARENT.model_copy(update={"uri": "elsewhere/in"})
    with ArtifactWriter.open(place, "features", {"seed": 0}, parents=[moved], target=TARGET) as writer:
        assert writer.finished == first


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"config": {"seed": 1}}, "seed 0, now 1"),
        ({"config": {}}, "seed 0, now null"),
        ({"parents": [PARENT.model_copy(update={"digest": "b" * 64})]}, "other content of runs/in"),
        ({"parents": []}, "other inputs"),
        ({"target": OTHER_TARGET}, "target a, now b, which differs in chat_template"),
        ({"target": None}, "another target"),
    ],
)
@pytest.mark.parametrize("state", ["a finished", "an unfinished"])
def test_what_was_made_otherwise_is_left_alone(
    place: str, changes: dict[str, Any], says: str, state: str
) -> None:
    settings = {"config": {"seed": 0}, "parents": [PARENT], "target": TARGET}
    with ArtifactWriter.open(place, "features", **settings) as writer:
        writer.add_shard("a", b"1", rows=1)
        if state == "a finished":
            writer.finish({})
    before = contents(place)
    line = refusal(lambda: ArtifactWriter.open(place, "features", **(settings | changes)))
    assert f"{place} holds {state} features artifact made with other settings ({says})" in line
    assert "--overwrite" in line
    assert contents(place) == before


def test_overwrite_replaces_finished_and_unfinished(place: str) -> None:
    finished(place)
    with ArtifactWriter.open(place, "features", {"seed": 1}, overwrite=True) as writer:
        assert writer.finished is None
        assert artifact_state(place) == "partial"
        writer.add_shard("old.bin", b"old", rows=1)
        writer.add_file("old.json", b"old")
    with ArtifactWriter.open(place, "features", {"seed": 2}, overwrite=True) as writer:
        assert writer.committed == ()
        writer.add_shard("new.bin", b"new", rows=1)
        writer.finish({})
    assert set(contents(place)) == {"manifest.json", stored("new.bin", b"new")}


def test_overwrite_keeps_files_that_are_not_the_artifacts(place: str) -> None:
    finished(place)
    put(place, "notes.txt", b"mine")
    with ArtifactWriter.open(place, "features", {"seed": 1}, overwrite=True) as writer:
        writer.finish({})
    assert contents(place)["notes.txt"] == b"mine"


def test_overwrite_replaces_an_artifact_of_a_newer_schema(place: str) -> None:
    finished(place)
    manifest = json.loads(contents(place)["manifest.json"]) | {"schema_version": 99, "novelty": 1}
    put(place, "manifest.json", json.dumps(manifest).encode())
    assert "upgrade eagle" in refusal(lambda: finished(place))
    with ArtifactWriter.open(place, "features", {}, overwrite=True) as writer:
        writer.finish({})
    assert set(contents(place)) == {"manifest.json"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_another_kind_of_artifact_is_never_replaced(place: str, overwrite: bool) -> None:
    finished(place)
    before = contents(place)
    line = refusal(lambda: ArtifactWriter.open(place, "head", {}, overwrite=overwrite))
    assert "features artifact" in line
    assert "choose another output" in line
    assert contents(place) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", "deep/thesis.tex", "manifest.json"])
def test_a_folder_of_something_else_is_never_touched(place: str, name: str, overwrite: bool) -> None:
    put(place, name, b'{"not": "ours"}')
    before = contents(place)
    line = refusal(lambda: ArtifactWriter.open(place, "features", {}, overwrite=overwrite))
    assert place in line
    assert contents(place) == before


def test_a_file_is_no_place_for_an_artifact(place: str) -> None:
    put(place, "file", b"x")
    assert "is a file" in refusal(lambda: ArtifactWriter.open(join(place, "file"), "features", {}))


def old_unfinished(uri: str) -> None:
    """What an eagle without claims left when it was stopped."""
    entry = {"path": "old.bin", "rows": 1, "bytes": 3, "sha256": "a" * 64}
    run = {"kind": "features", "schema_version": 1, "config": {"seed": 0}, "parents": [], "target": None}
    put(uri, "_run.json", json.dumps(run | {"process": None, "clearing": None}).encode())
    put(uri, "_records/0.json", json.dumps({"shard": entry, "note": {}}).encode())
    files = {"files": [entry | {"path": "deep/old.json"}], "pending": entry | {"path": "pending.json"}}
    put(uri, "_records/files.json", json.dumps(files).encode())
    for name in ("old.bin", "deep/old.json", "pending.json"):
        put(uri, name, b"old")


def test_an_unfinished_artifact_of_an_older_eagle_is_refused_and_replaced(place: str) -> None:
    old_unfinished(place)
    before = contents(place)
    assert artifact_state(place) == "partial"
    assert "unfinished features artifact" in refusal(lambda: open_artifact(place, "features"))
    line = refusal(lambda: ArtifactWriter.open(place, "features", CONFIG))
    assert f"{place} was begun by another version of eagle: use --overwrite" in line
    assert contents(place) == before
    with ArtifactWriter.open(place, "features", CONFIG, overwrite=True) as writer:
        writer.finish({})
    assert set(contents(place)) == {"manifest.json"}
