from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import ArtifactWriter, claims, open_artifact, unfinished
from stages.artifacts.folder import Folder, open_folder
from stages.artifacts.process import Process
from stages.artifacts.run_record import read_run
from stages.errors import EagleError
from tests.artifacts.interruption import CONFIG, contents


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.artifacts.races", str(tmp_path_factory.mktemp("races"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("where", ["one machine", "machines"])
def test_of_runs_that_take_over_at_once_exactly_one_goes_on(races: dict[str, Any], where: str) -> None:
    for ended in races[where]:
        refused = [line for line in ended if line]
        assert len(refused) == len(ended) - 1, ended
        assert all("is writing" in line or "taken over" in line for line in refused), refused


def test_a_writer_that_wakes_after_another_took_over_stops(races: dict[str, Any]) -> None:
    second, first, *faults = races["woken"]
    assert second == ""
    assert "was finished or removed while this process wrote it" in first
    assert not faults


def test_a_living_writer_is_left_alone_whatever_the_clocks_say(races: dict[str, Any]) -> None:
    for line in races["living"]:
        assert line.startswith("another eagle process (pid ")
        assert " on first) is writing" in line


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every writer counts as another machine's, and one that does not show life at once as dead."""
    monkeypatch.setattr(Process, "runs", lambda self: None)
    monkeypatch.setattr(claims, "WATCH_S", 0.0)


class Zombie:
    """A writer that stands still before its change of a given number, while `meanwhile` is done."""

    def __init__(self, uri: str, at: int, meanwhile: Callable[[], None]) -> None:
        self.writer = ArtifactWriter.open(uri, "features", CONFIG)
        self.stood_still = False
        self._at = at
        self._meanwhile = meanwhile
        for name in ("write", "create", "remove", "remove_each", "remove_tree"):
            setattr(self.writer._folder, name, self._hooked(getattr(self.writer._folder, name)))

    def stood_still_or_refused(self, write: Callable[[ArtifactWriter], None]) -> bool:
        """Writes and finishes; whether it stood still on the way. Only then may it have been refused."""
        try:
            with self.writer as writer:
                write(writer)
                writer.finish({})
        except EagleError:
            assert self.stood_still
        return self.stood_still

    def _hooked(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._at -= 1
            if self._at == 0:
                self.stood_still = True
                self._meanwhile()
            return change(*arguments)

        return call


def write_all(writer: ArtifactWriter, by: str, *, state: str | None = None, shards: int = 2) -> None:
    for number in range(len(writer.committed), shards):
        writer.add_file("state.bin", (state or f"state {number} by {by}").encode())
        writer.add_shard(f"{number}.bin", f"shard {number} by {by}".encode(), rows=1)


def whole(uri: str, by: set[str]) -> bool:
    artifact = open_artifact(uri, "features")
    assert [error for _, error in artifact.verify_all() if error] == []
    shards = [artifact.read(shard.path).decode() for shard in artifact.manifest.shards]
    return len(shards) == 2 and all(shard.rpartition(" ")[2] in by for shard in shards)


def test_a_writer_woken_anywhere_after_another_finished_changes_nothing(elsewhere: None) -> None:
    """The file beside the shards is the same for both: one that stands still as it replaces it does so."""
    at, stood_still = 0, True
    while stood_still:
        at += 1
        uri = f"memory://woken-after-{at}"

        def finish(uri: str = uri) -> None:
            with ArtifactWriter.open(uri, "features", CONFIG) as other:
                if other.finished is None:
                    write_all(other, "other", state="state")
                    other.finish({})

        zombie = Zombie(uri, at, finish)
        stood_still = zombie.stood_still_or_refused(lambda writer: write_all(writer, "zombie", state="state"))
        assert whole(uri, {"zombie", "other"} if stood_still else {"zombie"})
        with ArtifactWriter.open(uri, "features", CONFIG) as again:
            assert again.finished is not None
        assert not [name for name in contents(uri) if name.startswith("_")]
    assert at > 15


def test_a_writer_woken_anywhere_while_another_writes_never_mixes_into_it(elsewhere: None) -> None:
    at, stood_still = 0, True
    refused = []
    while stood_still:
        at += 1
        uri = f"memory://woken-within-{at}"
        others: list[ArtifactWriter] = []

        def begin(uri: str = uri, others: list[ArtifactWriter] = others) -> None:
            others.append(ArtifactWriter.open(uri, "features", CONFIG))
            if others[0].finished is None:
                write_all(others[0], "other", shards=1)

        zombie = Zombie(uri, at, begin)
        stood_still = zombie.stood_still_or_refused(lambda writer: write_all(writer, "zombie"))
        if others and others[0].finished is None:
            write_all(others[0], "other", shards=1)  # so that the file stays the first one where it can
            try:
                write_all(others[0], "other", state="state 0 by other")
                others[0].finish({})
            except EagleError as error:
                refused.append(str(error))
                with ArtifactWriter.open(uri, "features", CONFIG) as again:
                    again.add_file("state.bin", b"state 0 by other")
                    again.finish({})
        assert whole(uri, {"zombie", "other"})
    assert at > 15
    assert refused
    assert all("state.bin was changed by another process" in line for line in refused)


def test_a_claim_that_cannot_be_read_is_watched_and_then_taken_over(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(claims, "WATCH_S", 0.1)
    with ArtifactWriter.open(place, "features", CONFIG) as writer:
        writer.add_shard("a", b"1", rows=1)
    folder = open_folder(place)
    run = read_run(folder)
    assert run is not None
    folder.write(f"_run/{run.generation}/1/claim.json", b"")
    with ArtifactWriter.open(place, "features", CONFIG) as writer:
        assert len(writer.committed) == 1
        writer.finish({})
    assert "waiting for up to" in caplog.text
    assert open_artifact(place, "features").manifest.counts == {}


def test_a_writer_shows_life_until_it_is_left_or_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 0.01)
    uri = str(tmp_path / "x")
    writer = ArtifactWriter.open(uri, "features", CONFIG)
    folder = open_folder(uri)
    wait_until(lambda: (beats := holder(folder)) is not None and beats.beats > 3)
    assert (found := unfinished(uri)) is not None
    assert found.writer is not None
    assert found.writer.pid == os.getpid()
    with writer:
        pass
    assert (found := unfinished(uri)) is not None
    assert found.writer is None
    before = beating()
    forgotten = ArtifactWriter.open(uri, "features", CONFIG)
    (thread,) = beating() - before
    del forgotten
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def holder(folder: Folder) -> claims.Claim | None:
    run = read_run(folder)
    assert run is not None
    last = claims.last_claim(folder, run.generation)
    return claims.parse_claim(last[1]) if last else None


def beating() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "eagle-claim"}


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen within ten seconds")


def test_a_second_writer_on_this_machine_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    uri = str(tmp_path / "x")
    code = (
        "import sys; from stages.artifacts import ArtifactWriter\n"
        f"with ArtifactWriter.open({uri!r}, 'features', {{'seed': 0}}): print('begun', flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"begun\n"
    before = contents(uri)
    for overwrite in (False, True):
        with pytest.raises(
            EagleError, match=f"another eagle process .pid {other.pid} on .* is writing {uri}"
        ):
            ArtifactWriter.open(uri, "features", CONFIG, overwrite=overwrite)
    assert contents(uri) == before
    other.kill()
    other.communicate()
    with ArtifactWriter.open(uri, "features", CONFIG) as writer:
        writer.finish({})


@pytest.mark.skipif(not Path("/proc").exists(), reason="start times are read from /proc")
def test_a_dead_writer_whose_number_another_process_got_is_no_writer() -> None:
    this = Process.this()
    assert this.runs()
    assert this.model_copy(update={"started": "1"}).runs() is False
    assert this.model_copy(update={"space": "another boot"}).runs() is None
    assert this.model_copy(update={"host": "elsewhere"}).runs() is None
    assert this.model_copy(update={"pid": 2**22 + 1}).runs() is False
