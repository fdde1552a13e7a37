"""Writers that are killed, run out of disk, or are taken over."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.artifacts import (
    ArtifactWriter,
    artifact_state,
)
from stages.artifacts.uri import filesystem
from tests.artifacts.interruption import CONFIG, contents, make, make_again
from tests.artifacts.made import put, refusal, stored


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


def test_a_writer_that_was_taken_over_stops_before_it_commits(place: str) -> None:
    with ArtifactWriter.open(place, "features", CONFIG) as first:
        with ArtifactWriter.open(place, "features", CONFIG) as second:
            assert "taken over" in refusal(lambda: first.add_shard("a", b"1", rows=1))
            assert "taken over" in refusal(lambda: first.finish({}))
            second.finish({})
        assert "was finished or removed" in refusal(lambda: first.add_file("a", b"1"))
