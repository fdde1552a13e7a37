"""Shards of a bucket that are not what they were: the stage that reads them says which, and takes nothing."""

from __future__ import annotations

import pytest

from tests.faults.runs import Place, contents

DAMAGES = {
    "flipped": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "does not match its digest"),
    "truncated": (lambda data: data[:-100], "is truncated"),
    "missing": (lambda data: None, "is missing"),
}


@pytest.mark.parametrize(
    ("stage", "source", "damage"),
    [
        *(("extract-features", "conversations", damage) for damage in DAMAGES),
        ("train", "features", "flipped"),
    ],
)
def test_a_damaged_shard_is_named(gcs: Place, stage: str, source: str, damage: str) -> None:
    uri = gcs.copy(getattr(gcs.runs, source))
    change, says = DAMAGES[damage]
    path = next(f"{uri}/{name}" for name in contents(gcs.server, uri) if name.startswith(f"{source}-00001"))
    whole = gcs.read(path)
    gcs.server.remove("bucket", path.removeprefix("gs://bucket/"))
    if (changed := change(whole)) is not None:
        gcs.write(path, changed)
    ended = gcs.start(stage, **{source: uri}).wait()
    assert f"{path} {says}" in ended.error
    assert "manifest.json" not in gcs.contents()
    gcs.write(path, whole)
    again = gcs.start(stage, **{source: uri}).wait()
    assert again.code == 0, again.err
