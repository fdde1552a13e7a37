from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from stages.artifacts.manifest import (
    SCHEMA_VERSIONS,
    Manifest,
    Parent,
    Shard,
    TargetFingerprint,
    check_path,
    parse_manifest,
)
from stages.errors import EagleError

TARGET = TargetFingerprint(
    name="a", config="1" * 64, tokenizer="2" * 64, chat_template="3" * 64, weights="4" * 64, dtype="bfloat16"
)


def manifest(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "kind": "features",
        "schema_version": SCHEMA_VERSIONS["features"],
        "tool_version": "1.0",
        "created": "2030-01-01T00:00:00+00:00",
        "config": {"seed": 0, "layers": [1, 2]},
        "parents": (Parent(uri="runs/a", kind="conversations", digest="a" * 64),),
        "target": TARGET,
        "counts": {"rows": 3, "rate": 0.5, "by_source": {"chat": 3}},
        "shards": (Shard(path="a.bin", rows=3, bytes=5, sha256="b" * 64),),
        "files": (),
    }
    return Manifest(**(fields | changes))


def changed_json(**changes: object) -> bytes:
    return json.dumps(json.loads(manifest().to_json()) | changes).encode()


def test_a_manifest_reads_back_as_it_was_written() -> None:
    assert parse_manifest(manifest().to_json(), "runs/x") == manifest()


def test_digest_is_blind_to_time_tool_version_and_names_only() -> None:
    digest = manifest().digest
    assert manifest(parents=(Parent(uri="gs://b/a", kind="conversations", digest="a" * 64),)).digest == digest
    assert manifest(target=TARGET.model_copy(update={"name": "b"})).digest == digest
    assert manifest(parents=(Parent(uri="runs/a", kind="conversations", digest="c" * 64),)).digest != digest
    assert manifest(target=TARGET.model_copy(update={"dtype": "float32"})).digest != digest
    assert manifest(created="2031-01-01T00:00:00+00:00", tool_version="2.0").digest == digest
    assert manifest(config={"layers": [1, 2], "seed": 0}).digest == digest
    assert manifest(config={"seed": 1, "layers": [1, 2]}).digest != digest
    assert manifest(shards=(Shard(path="a.bin", rows=3, bytes=5, sha256="c" * 64),)).digest != digest
    assert manifest(parents=()).digest != digest


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (manifest().to_json()[:40], "is not JSON"),
        (b"[]", "holds no JSON object"),
        (changed_json(schema_version=SCHEMA_VERSIONS["features"] + 1, novelty=1), "upgrade eagle"),
        (changed_json(novelty=1), "unknown field novelty"),
        (changed_json(kind="model"), "kind: "),
        (changed_json(shards=[{"path": "../x", "rows": 1, "bytes": 1, "sha256": "a" * 64}]), "'../x'"),
        (b'{"kind": "head"}', "no field schema_version"),
    ],
)
def test_a_manifest_that_cannot_be_trusted_is_refused_in_one_line(data: bytes, says: str) -> None:
    with pytest.raises(EagleError) as refusal:
        parse_manifest(data, "runs/x")
    assert says in str(refusal.value)
    assert "runs/x/manifest.json" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "path", ["", "/a", "a/../b", "./a", "a//b", "a/", "a\\b", "_run.json", "_records/0.json", "manifest.json"]
)
def test_paths_stay_inside_the_artifact_and_off_its_own_files(path: str) -> None:
    with pytest.raises(ValueError, match=r"path|name"):
        check_path(path)


def test_two_entries_of_one_path_are_refused() -> None:
    shard = Shard(path="a.bin", rows=3, bytes=5, sha256="b" * 64)
    with pytest.raises(ValidationError, match=r"same path"):
        manifest(shards=(shard,), files=(shard,))


def test_numbers_that_json_lacks_are_not_written() -> None:
    with pytest.raises(ValueError, match=r"JSON compliant"):
        manifest(counts={"loss": float("nan")}).to_json()


def test_mismatch_names_each_part_that_differs_and_never_the_name() -> None:
    assert TARGET.mismatch(TARGET.model_copy(update={"name": "b"})) == []
    other = TARGET.model_copy(update={"chat_template": "9" * 64, "dtype": "float32"})
    assert TARGET.mismatch(other) == ["chat_template", "dtype"]
