"""What the store builds on, on the real server: whole objects, made once where asked, checked on the way."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stages.artifacts import ArtifactWriter, open_artifact
from stages.artifacts.folder import open_folder
from stages.errors import EagleError
from tests.gcs.server import GcsServer

_numbers = itertools.count()


@pytest.fixture
def uri(gcs_server: GcsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.url)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    prefix = f"store-{next(_numbers)}/"
    yield f"gs://bucket/{prefix}artifact"
    for name in gcs_server.objects("bucket", prefix):
        gcs_server.remove("bucket", prefix + name)  # it keeps them in memory


def test_of_many_who_create_an_object_at_once_one_succeeds(uri: str) -> None:
    folder = open_folder(uri)
    with ThreadPoolExecutor(8) as pool:
        for round_ in range(20):
            name = f"claim-{round_}.json"
            made = list(pool.map(lambda number: folder.create(name, b"%d" % number), range(8)))  # noqa: B023
            assert sum(made) == 1
            assert folder.read(name) == b"%d" % made.index(True)


LINES = [b"--==0==", b"--==0==--", b"--==0==--\r", b"--==0==\nContent-Type: text/plain\n\n"]


@pytest.mark.parametrize("line", LINES)
def test_a_payload_with_the_line_between_the_parts_of_an_upload_comes_back_whole(
    uri: str, line: bytes, tmp_path: Path
) -> None:
    """gcsfs's one-request upload separates its parts by this line, wherever it stands."""
    data = b"before\n" + line + b"\nafter"
    (tmp_path / "shard.bin").write_bytes(data)
    with ArtifactWriter.open(uri, "features", {}) as writer:
        shard = writer.add_shard("a.bin", data, rows=1, note={"text": data.decode()})
        by_path = writer.add_shard("b.bin", tmp_path / "shard.bin", rows=1)
        writer.add_file("c.json", data)
        writer.finish({"line": data.decode()})
    artifact = open_artifact(uri, "features")
    for name in (shard.path, by_path.path, "c.json"):
        assert artifact.read(name) == data
    assert artifact.manifest.counts["line"] == data.decode()


@pytest.mark.parametrize("by_path", [False, True])
def test_a_shard_larger_than_one_upload_comes_back_whole(uri: str, by_path: bool, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 53 + b"end"  # gcsfs sends 50 MB at a time
    (tmp_path / "shard.bin").write_bytes(data)
    with ArtifactWriter.open(uri, "features", {}) as writer:
        shard = writer.add_shard("a.bin", tmp_path / "shard.bin" if by_path else data, rows=1)
        writer.finish({})
    artifact = open_artifact(uri, "features")
    assert artifact.local(shard.path).read_bytes() == data
    assert artifact.read_range(shard.path, len(data) - 7, len(data)) == data[-7:]


def test_many_small_files_and_their_replacement(uri: str, gcs_server: GcsServer) -> None:
    def make(seed: int, overwrite: bool) -> dict[str, bytes]:
        files = {f"file-{number:03}.json": json.dumps([seed, number]).encode() for number in range(60)}
        with ArtifactWriter.open(uri, "features", {"seed": seed}, overwrite=overwrite) as writer:
            for name, data in files.items():
                writer.add_file(name, data)
            writer.finish({})
        return files

    make(0, overwrite=False)
    files = make(1, overwrite=True)
    artifact = open_artifact(uri, "features")
    assert {entry.path: artifact.read(entry.path) for entry in artifact.manifest.files} == files
    held = gcs_server.objects("bucket", uri.removeprefix("gs://bucket/") + "/")
    assert held.keys() == files.keys() | {"manifest.json"}


def test_an_object_of_another_tool_that_has_the_name_of_a_folder_is_no_matter(
    uri: str, gcs_server: GcsServer
) -> None:
    """Consoles make an empty object `folder/` to show a folder; it is nobody's file."""
    gcs_server.write("bucket", uri.removeprefix("gs://bucket/") + "/", b"")
    with ArtifactWriter.open(uri, "features", {}) as writer:
        writer.add_file("a.json", b"{}")
        writer.finish({})
    assert open_artifact(uri, "features").read("a.json") == b"{}"


def test_a_prefix_that_is_no_folder_boundary_is_another_artifact(uri: str) -> None:
    with ArtifactWriter.open(f"{uri}-2", "features", {}) as writer:
        writer.finish({})
    with ArtifactWriter.open(uri, "features", {}) as writer:
        assert writer.finished is None
        writer.finish({})
    with pytest.raises(EagleError, match="does not exist"):
        open_artifact(uri.removesuffix("act"), "features")
