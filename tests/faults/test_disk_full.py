"""Disks that fill up in mid-run: one line that says so, and the same command continues once there is room."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from tests.faults.runs import Place, comparable, contents, wait_until


def fill(folder: Path) -> Path:
    """Takes all the room that is left on the disk of `folder`."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return filler


@pytest.mark.parametrize("stage", ["gen-data", "extract-features"])
def test_a_disk_that_fills_up_in_mid_run_is_one_line_and_the_same_command_continues(
    local: Place, stage: str, tmp_path: Path
) -> None:
    if not local.runs.eagle.namespaces:
        pytest.skip("no namespaces here")
    disk = tmp_path / "runs"
    disk.mkdir()
    seen = local.runs.eagle.mount(disk, 1 << 22)
    run = local.start(stage)
    wait_until(lambda: list(seen.glob("output/_run/*/*/shard-1.json")), run)
    run.signal(signal.SIGSTOP)
    filler = fill(seen)
    run.signal(signal.SIGCONT)
    ended = run.wait()
    assert "no space left" in ended.error
    assert "same command" in ended.error
    assert not (seen / "output/manifest.json").exists()
    first = next((seen / "output").glob("*-00000*"))
    inode = first.stat().st_ino
    filler.unlink()
    again = local.start(stage).wait()
    assert again.code == 0, again.err
    assert first.stat().st_ino == inode, "a committed shard was made again"
    assert comparable(contents(local.server, str(seen / "output"))) == local.runs.whole[stage]


def test_a_file_that_may_not_grow_is_a_full_disk(local: Place) -> None:
    run = local.runs.eagle.start(
        *local.runs.arguments("extract-features", local.output), env=local.env, file_limit=90_000
    )
    assert "no space left" in run.wait().error
    assert local.start("extract-features").wait().code == 0
    local.is_whole("extract-features")


def test_a_full_disk_below_the_cache_is_named(gcs: Place, tmp_path: Path) -> None:
    if not gcs.runs.eagle.namespaces:
        pytest.skip("no namespaces here")
    cache = tmp_path / "cache"
    cache.mkdir()
    seen = gcs.runs.eagle.mount(cache, 1 << 16)
    features = gcs.copy(gcs.runs.features)
    ended = gcs.start("train", features=features).wait()
    assert "no space left" in ended.error
    assert str(cache) in ended.error
    gcs.runs.eagle.mount(cache, 1 << 24)
    assert gcs.start("train", features=features).wait().code == 0
    assert os.listdir(seen)
