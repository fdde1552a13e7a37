"""Shards that a thread of the writer commits."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from stages.artifacts import ArtifactWriter, open_artifact
from stages.artifacts.folder import LocalFolder
from tests.artifacts.interruption import CONFIG, contents
from tests.artifacts.made import stored


def test_shards_are_committed_in_order_by_a_thread(place: str, tmp_path: Path) -> None:
    (tmp_path / "2.bin").write_bytes(b"2")
    with ArtifactWriter.open(place, "features", CONFIG) as writer:
        for number in range(3):
            data = tmp_path / "2.bin" if number == 2 else b"%d" % number
            assert (
                writer.add_shard(f"{number}.bin", data, rows=number, note={"n": number}, wait=False) is None
            )
            assert len(writer.committed) in (number, number + 1)
        writer.flush()
        assert [done.note for done in writer.committed] == [{"n": 0}, {"n": 1}, {"n": 2}]
        writer.add_shard("3.bin", b"3", rows=3, wait=False)
        with pytest.raises(ValueError, match="already"):
            writer.add_shard("3.bin", b"other", rows=3)
        writer.add_shard("4.bin", b"4", rows=4, wait=False)
        shards = writer.finish({}).shards
    assert [shard.path for shard in shards] == [stored(f"{n}.bin", b"%d" % n) for n in range(5)]
    assert [error for _, error in open_artifact(place, "features").verify_all() if error] == []


def test_at_most_one_shard_waits_and_what_is_pending_on_leaving_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, writing = threading.Event(), []
    write = LocalFolder.write

    def slow(self: LocalFolder, name: str, data: bytes | Path) -> None:
        if name.endswith(".bin"):
            writing.append(name)
            assert go.wait(10)
        write(self, name, data)

    monkeypatch.setattr(LocalFolder, "write", slow)
    uri = str(tmp_path / "x")
    second = threading.Event()

    def add_two() -> None:
        with suppress(KeyError), ArtifactWriter.open(uri, "features", CONFIG) as writer:
            writer.add_shard("0.bin", b"0", rows=1, wait=False)
            writer.add_shard("1.bin", b"1", rows=1, wait=False)
            second.set()
            raise KeyError

    thread = threading.Thread(target=add_two)
    thread.start()
    assert not second.wait(0.2)
    go.set()
    thread.join()
    with ArtifactWriter.open(uri, "features", CONFIG) as again:
        assert len(again.committed) == 2


LIMITED = """
import resource, signal, sys
from stages.artifacts import ArtifactWriter
from stages.errors import EagleError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
uri, last = sys.argv[1:]
try:
    with ArtifactWriter.open(uri, "features", {"seed": 0}) as writer:
        writer.add_shard("0.bin", b"0", rows=1, wait=False)
        writer.add_shard("1.bin", bytes(200_000), rows=1, wait=False)
        {"add_shard": lambda: writer.add_shard("2.bin", b"2", rows=1), "flush": writer.flush,
         "add_file": lambda: writer.add_file("f", b""), "finish": lambda: writer.finish({}),
         "leave": lambda: None}[last]()
        print("went on" if last != "leave" else "left")
except EagleError as error:
    print(error)
"""


@pytest.mark.parametrize("last", ["add_shard", "add_file", "flush", "finish", "leave"])
def test_what_fails_in_the_thread_is_raised_by_what_comes_next_and_a_rerun_continues(
    tmp_path: Path, last: str
) -> None:
    uri = str(tmp_path / "x")
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, uri, last], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    said = run.stdout.strip().removeprefix("left\n")
    assert said.startswith(f"no space left to write {uri}/1-"), run.stdout
    assert said.endswith("it continues after what is already committed")
    with ArtifactWriter.open(uri, "features", CONFIG) as writer:
        assert [done.shard.path for done in writer.committed] == [stored("0.bin", b"0")]
        writer.finish({})
    assert set(contents(uri)) == {"manifest.json", stored("0.bin", b"0")}
