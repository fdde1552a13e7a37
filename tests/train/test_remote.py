"""Training on features in an object store, through a cache that they do not fit into."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from stages.artifacts import Artifact, open_artifact
from stages.progress import Reporter
from stages.train.config import TrainConfig
from stages.train.stage import run
from stages.train.training import Training
from tests.train.synthetic import make_features, make_row

QUIET = Reporter(quiet=True)
CACHE = 500_000
"""Bytes; a shard has a quarter of it, so that a window has one shard or two."""


def make_config(features: str, output: Path, **settings: object) -> TrainConfig:
    fields = {"features": features, "output": str(output), "device": "cpu", "batch_tokens": 128, "epochs": 1}
    return TrainConfig.model_validate(fields | {"draft_vocab_size": 64} | settings)


def size_of(folder: Path) -> int:
    """Bytes of the files, when two looks in a row find the same: others remove and add files meanwhile."""
    before, now = {}, files_of(folder)
    while before != now:
        before, now = now, files_of(folder)
    return sum(now.values())


def files_of(folder: Path) -> dict[int, int]:
    """Bytes by inode, each counted once though it may be renamed meanwhile."""
    sizes = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            sizes[status.st_ino] = status.st_size if path.is_file() else 0
    return sizes


def test_the_head_is_that_of_local_features_and_the_cache_stays_within_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EAGLE_CACHE_GB", str(CACHE / 1e9))
    shards = [
        [make_row([0] * 4 + [1] * 21, seed=9 * s + n, row_id=9 * s + n) for n in range(9)] for s in range(9)
    ]
    remote = make_features("memory://train-remote/features", shards)
    sizes = [shard.bytes for shard in open_artifact(remote, "features").manifest.shards]
    assert sum(sizes) > 2 * CACHE
    assert max(sizes) < CACHE / 4

    fetched: list[str] = []
    prefetch, take_step = Artifact.prefetch, Training.step
    cached: list[int] = []

    def recording(artifact: Artifact, paths: list[str]) -> None:
        fetched.extend(paths)
        prefetch(artifact, paths)

    def measuring(training: Training, batch: object, number: int) -> object:
        cached.append(size_of(tmp_path / "cache"))
        return take_step(training, batch, number)

    monkeypatch.setattr(Artifact, "prefetch", recording)
    monkeypatch.setattr(Training, "step", measuring)
    run(make_config(remote, tmp_path / "remote"), QUIET)
    assert set(fetched) == {shard.path for shard in open_artifact(remote, "features").manifest.shards}
    assert 0 < max(cached) <= CACHE
    window = open_artifact(str(tmp_path / "remote"), "head").manifest.counts["window_bytes"]
    assert window <= CACHE / 2
    monkeypatch.undo()

    local = make_features(tmp_path / "features", shards)
    run(make_config(local, tmp_path / "local", window_bytes=window), QUIET)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("remote", "local")]
    assert weights[0] == weights[1]
