from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stages.artifacts import Artifact, ArtifactWriter, cache, cache_folder, open_artifact
from stages.artifacts.cache import cache_limit
from stages.artifacts.folder import ObjectFolder, open_folder
from stages.errors import EagleError
from tests.gcs.server import GcsServer

SIZE = 1000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def remote(uri: str, count: int = 6) -> Artifact:
    with ArtifactWriter.open(uri, "features", {}) as writer:
        for number in range(count):
            writer.add_shard(f"{number}.bin", content(number), rows=1)
        writer.add_file("target/config.json", b"{}")
        writer.add_file("target/deep/tokenizer.json", b"[]")
        writer.finish({})
    return open_artifact(uri, "features")


def paths(artifact: Artifact) -> list[str]:
    return [shard.path for shard in artifact.manifest.shards]


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh cache for four of the files."""
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EAGLE_CACHE_GB", str((4 * SIZE + 1) / 1e9))
    monkeypatch.setattr(cache, "_kept", cache._Kept())


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are fetched, as they are."""
    names: list[str] = []
    blocks = ObjectFolder.blocks

    def counted(self: ObjectFolder, name: str, size: int) -> Iterator[bytes]:
        names.append(name)
        return blocks(self, name, size)

    monkeypatch.setattr(ObjectFolder, "blocks", counted)
    return names


def copies() -> set[bytes]:
    return {path.read_bytes() for path in (cache_folder() / "artifacts/files").iterdir()}


def test_a_copy_is_fetched_once_for_all_artifacts_that_hold_its_content(fetched: list[str]) -> None:
    one, other = remote("memory://once-a"), remote("memory://once-b", 3)
    name = paths(one)[0]
    copy = one.local(name)
    assert copy.is_relative_to(cache_folder())
    assert copy.suffix == ".bin"
    assert copy.read_bytes() == content(0)
    assert one.local(name) == other.local(name) == copy
    assert open_artifact("memory://once-a", "features").local(name) == copy
    assert fetched == [name]


def test_a_local_artifact_is_read_where_it_is(tmp_path: Path) -> None:
    artifact = remote(str(tmp_path / "x"))
    name = paths(artifact)[0]
    with artifact.pinned(name) as path:
        assert path == tmp_path / "x" / name
    assert artifact.local("target") == tmp_path / "x/target"
    artifact.prefetch(paths(artifact))
    assert not cache_folder().exists()


@pytest.mark.parametrize("damage", [b"damaged", content(9)])
def test_a_damaged_copy_is_fetched_again(
    damage: bytes, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = remote(f"memory://damaged-{len(damage)}")
    name = paths(artifact)[0]
    artifact.local(name).write_bytes(damage)
    monkeypatch.setattr(cache, "_compared", set())
    assert artifact.local(name).read_bytes() == content(0)
    assert len(fetched) == 2


def test_a_folder_of_an_artifact_is_a_folder_and_shares_its_copies(fetched: list[str]) -> None:
    artifact = remote("memory://tree", 2)
    with artifact.pinned("target/config.json") as config, artifact.pinned("target") as folder:
        assert (folder / "config.json").samefile(config)
        assert (folder / "deep/tokenizer.json").read_bytes() == b"[]"
    whole = artifact.local(".")
    assert (whole / paths(artifact)[1]).read_bytes() == content(1)
    assert whole / "target" == folder
    assert len(fetched) == 4


def test_a_folder_is_made_where_there_are_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*paths: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    artifact = remote("memory://nolinks", 5)
    monkeypatch.setattr("os.link", no_links)
    with artifact.pinned("target") as folder:
        for path in paths(artifact):
            artifact.pinned(path).release()
        assert (folder / "config.json").read_bytes() == b"{}"
        assert (folder / "deep/tokenizer.json").read_bytes() == b"[]"


def test_who_waits_for_a_copy_gets_it_while_the_one_that_fetched_it_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    artifact = remote("memory://waits")
    name, go, fetching = paths(artifact)[0], threading.Event(), threading.Event()
    blocks = ObjectFolder.blocks

    def slow(self: ObjectFolder, name: str, size: int) -> Iterator[bytes]:
        fetching.set()
        assert go.wait(10)
        return blocks(self, name, size)

    monkeypatch.setattr(ObjectFolder, "blocks", slow)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(artifact.pinned, name)
        assert fetching.wait(10)
        others = [pool.submit(artifact.pinned, name) for _ in range(2)]
        threading.Event().wait(0.05)
        go.set()
        held = [one.result(10) for one in (first, *others)]
    for one in held:
        assert one.path.read_bytes() == content(0)
        one.release()


def test_the_copies_used_longest_ago_go_first_and_all_names_of_a_copy_go_with_it() -> None:
    artifact = remote("memory://lru")
    for number in (0, 1, 2, 3, 0, 4):
        with artifact.pinned(paths(artifact)[number]):
            pass
    assert copies() == {content(number) for number in (0, 2, 3, 4)}
    with artifact.pinned("target/deep") as folder:
        assert (folder / "tokenizer.json").exists()
    for number in (5, 1, 2, 3):
        with artifact.pinned(paths(artifact)[number]):
            pass
    assert copies() == {content(number) for number in (5, 1, 2, 3)}
    assert not folder.exists()


def test_what_is_pinned_stays_though_the_cache_overflows() -> None:
    artifact = remote("memory://pinned")
    pinned = [artifact.pinned(path) for path in paths(artifact)[:5]]
    assert len(copies()) == 5
    for held in pinned[1:]:
        held.release()
    with artifact.pinned(paths(artifact)[5]):
        assert content(0) in copies()
        assert len(copies()) == 4


def test_what_local_gave_out_stays_until_half_the_cache_was_given_out_since() -> None:
    artifact = remote("memory://kept")
    names = paths(artifact)
    first, second = artifact.local(names[0]), artifact.local(names[1])
    for name in names[2:]:
        with artifact.pinned(name):
            pass
    assert first.exists()
    assert second.exists()
    artifact.local(names[2])
    for name in names[3:]:
        with artifact.pinned(name):
            pass
    assert not first.exists()
    assert second.exists()


def test_the_bound_is_what_is_set_and_never_more_than_half_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_limit() == 4 * SIZE + 1
    monkeypatch.setattr(cache, "free_bytes", lambda uri: 3 * SIZE)
    assert cache_limit() == 1.5 * SIZE
    remote("memory://bound").local("target")
    assert cache_limit() == (3 * SIZE + 4) // 2
    monkeypatch.delenv("EAGLE_CACHE_GB")
    monkeypatch.setattr(cache, "free_bytes", lambda uri: 10**15)
    assert cache_limit() == 50 * 10**9
    monkeypatch.setenv("EAGLE_CACHE_GB", "much")
    with pytest.raises(EagleError, match="EAGLE_CACHE_GB is 'much': give a number"):
        cache_limit()


def test_a_disk_without_room_for_a_copy_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = remote("memory://full")
    monkeypatch.setattr(cache, "free_bytes", lambda uri: SIZE - 1)
    with pytest.raises(EagleError, match=r"no space left in the cache .*1000 bytes, 999 free.*EAGLE_CACHE"):
        artifact.local(paths(artifact)[0])
    assert not copies()


def test_many_processes_share_a_cache_that_is_too_small_and_some_are_killed(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.artifacts.cache_readers", str(tmp_path / "shared")],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr[-2000:]
    seen = json.loads(run.stdout)
    assert not any(seen["wrong"]), seen["wrong"]
    assert seen["left"] <= seen["limit"]


def test_prefetched_files_are_there_when_they_are_wanted_and_not_fetched_twice(fetched: list[str]) -> None:
    artifact = remote("memory://ahead")
    names = paths(artifact)
    artifact.prefetch(names[:2])
    assert [artifact.local(name).read_bytes() for name in names[:2]] == [content(0), content(1)]
    artifact.prefetch(names[2:4])
    assert artifact.read(names[3]) == content(3)
    with artifact.pinned(names[2]) as path:
        assert path.read_bytes() == content(2)
    assert artifact.read_range(names[2], 3, 8) == content(2)[3:8]
    assert sorted(fetched) == sorted(names[:4])


def test_prefetching_stops_at_half_the_cache_and_goes_on_when_files_are_taken(fetched: list[str]) -> None:
    artifact = remote("memory://bounded")
    names = paths(artifact)
    artifact.prefetch(names)
    wait_until(lambda: len(fetched) == 2)
    threading.Event().wait(0.1)
    assert sorted(fetched) == names[:2]
    artifact.pinned(names[0]).release()
    wait_until(lambda: len(fetched) == 3)
    artifact.prefetch([])
    for name in names:
        artifact.pinned(name).release()
    assert len(copies()) == 4


def test_a_prefetch_that_fails_says_so_when_the_file_is_wanted() -> None:
    artifact = remote("memory://fails")
    name = paths(artifact)[0]
    open_folder("memory://fails").remove(name)
    artifact.prefetch([name])
    for _ in range(2):
        with pytest.raises(EagleError, match=f"{name} is missing"):
            artifact.local(name)


def test_files_of_which_a_third_is_read_in_ranges_are_not_fetched(fetched: list[str]) -> None:
    artifact = remote("memory://ranges")
    name = paths(artifact)[1]
    assert artifact.read_range(name, 0, 5) == content(1)[:5]
    assert artifact.read_range(name, SIZE - 5, SIZE) == content(1)[:5]
    assert artifact.read_range(name, 7, 7) == b""
    for start, stop in [(-1, 5), (5, 4), (0, SIZE + 1)]:
        with pytest.raises(ValueError, match="not within"):
            artifact.read_range(name, start, stop)
    assert not fetched


def test_an_artifact_is_read_by_spawned_and_forked_workers(gcs: GcsServer) -> None:
    artifact = remote("gs://bucket/workers")
    names = paths(artifact)
    assert pickle.loads(pickle.dumps(artifact)).manifest == artifact.manifest
    artifact.prefetch(names[2:])  # by threads that a forked worker does not have
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.starmap(read_in_worker, [(artifact, name) for name in names[:4]]) == [
                content(number) for number in range(4)
            ]


def read_in_worker(artifact: Artifact, name: str) -> bytes:
    assert artifact.read_range(name, 0, 1)
    return artifact.local(name).read_bytes()


def wait_until(condition: object) -> None:
    assert callable(condition)
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen within ten seconds")


def test_a_shared_folder_of_descriptors_is_not_leaked() -> None:
    artifact = remote("memory://descriptors")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(3):
        for name in paths(artifact):
            with artifact.pinned(name):
                pass
        artifact.pinned("target").release()
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after == before
