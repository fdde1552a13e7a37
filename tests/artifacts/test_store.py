from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import (
    Artifact,
    ArtifactWriter,
    Kind,
    Parent,
    Shard,
    TargetFingerprint,
    artifact_state,
    cache_folder,
    join,
    open_artifact,
)
from stages.artifacts.folder import open_folder
from stages.artifacts.uri import filesystem
from stages.errors import EagleError
from tests.artifacts.interruption import CONFIG, contents, make, make_again

TARGET = TargetFingerprint(
    name="a", config="1" * 64, tokenizer="2" * 64, chat_template="3" * 64, weights="4" * 64, dtype="bfloat16"
)
OTHER_TARGET = TARGET.model_copy(update={"name": "b", "chat_template": "5" * 64})
PARENT = Parent(uri="runs/in", kind="conversations", digest="a" * 64)


def stored(name: str, data: bytes) -> str:
    """The name under which a shard of this content is stored."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{hashlib.sha256(data).hexdigest()[:8]}{dot}{suffix}"


PART = stored("part-0.bin", b"0123456789")


def finished(uri: str, kind: Kind = "features", **settings: Any) -> Artifact:
    with ArtifactWriter.open(uri, kind, {"seed": 0} | settings, parents=[PARENT], target=TARGET) as writer:
        writer.add_shard("part-0.bin", b"0123456789", rows=2)
        writer.add_file("target/config.json", b"{}")
        writer.finish({"rows": 2})
    return open_artifact(uri, kind)


def refusal(action: Callable[[], object]) -> str:
    """The one line that `action` is refused with."""
    with pytest.raises(EagleError) as error:
        action()
    line = str(error.value)
    assert "\n" not in line
    return line


def put(uri: str, name: str, data: bytes) -> None:
    open_folder(uri).write(name, data)


# Writing and reading


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


# Refusals of readers


def test_an_unfinished_artifact_is_none(place: str) -> None:
    assert "is not an artifact" in refusal(lambda: open_artifact(place, "features"))
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
    assert "is not an artifact, it has no manifest.json: check the path" in refusal(
        lambda: open_artifact(place, None)
    )
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


# Refusals and acceptance of writers


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


# Interruption


def test_what_is_committed_is_there_after_an_exception(place: str) -> None:
    def fails() -> None:
        with ArtifactWriter.open(place, "features", CONFIG) as writer:
            writer.add_shard("a", b"1", rows=1, note={"prompts_done": 7})
            writer.add_file("state.bin", b"state")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    with ArtifactWriter.open(place, "features", CONFIG) as writer:
        assert [(done.shard.path, done.note) for done in writer.committed] == [
            (stored("a", b"1"), {"prompts_done": 7})
        ]
        assert [file.path for file in writer.files] == ["state.bin"]
        assert writer.local("state.bin").read_bytes() == b"state"
        writer.finish({}, drop=["state.bin"])
    assert set(contents(place)) == {"manifest.json", stored("a", b"1")}


def test_a_damaged_shard_and_those_after_it_are_made_again(place: str) -> None:
    with ArtifactWriter.open(place, "features", CONFIG) as writer:
        for name in "abc":
            writer.add_shard(name, b"whole", rows=1)
    put(place, stored("b", b"whole"), b"ha")
    with ArtifactWriter.open(place, "features", CONFIG) as writer:
        assert [done.shard.path for done in writer.committed] == [stored("a", b"whole")]
        writer.add_shard("b", b"whole", rows=1)
    with ArtifactWriter.open(place, "features", CONFIG) as writer:
        assert [done.shard.path for done in writer.committed] == [stored(name, b"whole") for name in "ab"]


class Killed(BaseException):
    """Stands for a kill: nothing catches it, so nothing of the writer runs after it."""


def kill_at_change(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Makes the memory store carry out no change from that number on."""
    fs, _ = filesystem("memory://")
    count = 0

    def counted(change: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count >= number:
                raise Killed
            return change(*args, **kwargs)

        return call

    for name in ("pipe_file", "put_file", "rm_file"):
        monkeypatch.setattr(fs, name, counted(getattr(fs, name)))


@pytest.mark.parametrize("start", ["empty", "finished", "unfinished"])
def test_an_object_store_run_killed_before_any_change_completes_to_the_same_bytes(
    start: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    make("memory://whole", tmp_path)
    whole = contents("memory://whole", without_created=True)
    kill_at, killed = 0, True
    while killed:
        kill_at += 1
        uri = f"memory://killed-{start}-{kill_at}"
        if start != "empty":
            make(uri, tmp_path, seed=1, finish=start == "finished")
        before = contents(uri)
        with monkeypatch.context() as patch:
            kill_at_change(patch, kill_at)
            try:
                make(uri, tmp_path, overwrite=start != "empty")
                killed = False
            except Killed:
                pass
        make_again(uri, tmp_path, before)
        assert contents(uri, without_created=True) == whole
    assert kill_at > 25


@pytest.mark.parametrize(
    "start",
    [
        "empty",
        "merging",
        "replacing parts",
        pytest.param("finished", marks=pytest.mark.slow),
        pytest.param("unfinished", marks=pytest.mark.slow),
    ],
)
def test_a_local_run_killed_by_sigkill_at_any_system_call_completes_to_the_same_bytes(
    start: str, tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.artifacts.interruption", str(tmp_path), start],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert int(run.stdout) > 25


def test_a_full_disk_says_so_and_a_rerun_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "x")
    with ArtifactWriter.open(uri, "features", CONFIG) as writer:
        writer.add_shard("a", b"1", rows=1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full_disk)
            line = refusal(lambda: writer.add_shard("b", b"2", rows=1))
    assert "no space left" in line
    assert "continues" in line
    assert not [path for path in Path(uri).iterdir() if path.name.startswith(("b", ".b"))]
    with ArtifactWriter.open(uri, "features", CONFIG) as writer:
        assert [done.shard.path for done in writer.committed] == [stored("a", b"1")]
        writer.add_shard("b", b"2", rows=1)
        writer.finish({})
    assert artifact_state(uri) == "complete"


def full_disk(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


# Two writers


def test_a_writer_that_was_taken_over_stops_before_it_commits(place: str) -> None:
    with ArtifactWriter.open(place, "features", CONFIG) as first:
        with ArtifactWriter.open(place, "features", CONFIG) as second:
            assert "taken over" in refusal(lambda: first.add_shard("a", b"1", rows=1))
            assert "taken over" in refusal(lambda: first.finish({}))
            second.finish({})
        assert "was finished or removed" in refusal(lambda: first.add_file("a", b"1"))
