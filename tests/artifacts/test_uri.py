from __future__ import annotations

import errno
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.artifacts import artifact_state, free_bytes
from stages.artifacts import uri as uri_module
from stages.artifacts.uri import filesystem, join, local_path, storage_errors
from stages.errors import EagleError
from tests.faults.proxy import answers, running_proxy
from tests.gcs.server import GcsServer


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("runs/x", Path("runs/x")),
        ("file:///data/x", Path("/data/x")),
        ("~/x", Path.home() / "x"),
        ("memory://x", None),
        ("gs://bucket/x", None),
    ],
)
def test_what_is_local(uri: str, path: Path | None) -> None:
    assert local_path(uri) == path


def test_join_puts_one_slash_between_parts() -> None:
    assert join("gs://bucket/run/", "/a/", "b.json") == "gs://bucket/run/a/b.json"
    assert join("memory://", "a") == "memory://a"


def test_an_unknown_scheme_is_one_line() -> None:
    with pytest.raises(EagleError, match=r"nosuch://x/y is no URI eagle can open"):
        filesystem("nosuch://x/y")


def test_a_web_server_that_is_not_there_is_refused_at_once() -> None:
    """fsspec says of it that there is no such file, which readers would ask for again for two minutes."""
    with socket.socket() as refuses:
        refuses.bind(("127.0.0.1", 0))  # and does not listen
        uri = f"http://127.0.0.1:{refuses.getsockname()[1]}/run"
        with pytest.raises(EagleError, match=rf"{uri} does not answer .*: check the network"):
            filesystem(uri)


def test_a_full_disk_is_one_line_that_says_a_rerun_continues() -> None:
    with (
        pytest.raises(EagleError, match=r"no space left to write runs/x.*continues"),
        storage_errors("runs/x"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(TypeError), storage_errors("runs/x"):
        raise TypeError("a bug")


def test_gcs_never_caches_listings_and_compares_uploads(gcs: GcsServer) -> None:
    fs, path = filesystem("gs://bucket/run")
    assert path == "bucket/run"
    assert fs.consistency == "md5"
    assert not fs.dircache.use_listings_cache


def test_a_missing_bucket_is_named(gcs: GcsServer) -> None:
    with pytest.raises(EagleError, match=r"bucket typo of gs://typo/run does not exist"):
        artifact_state("gs://typo/run")


def test_a_bucket_without_access_says_how_to_log_in(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running_proxy(gcs.url) as proxy:
        proxy.fault(answers(403, "caller has no access"), times=None)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        with pytest.raises(EagleError, match=r"no access to gs://bucket/run .*gcloud auth") as refusal:
            artifact_state("gs://bucket/run")
    assert "\n" not in str(refusal.value)
    assert caplog.records == []


def test_a_store_that_does_not_answer_is_given_up(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    monkeypatch.setattr(uri_module, "CONNECT_S", 1.0)
    began = time.monotonic()
    with pytest.raises(EagleError, match=r"gs://bucket/run does not answer|cannot read or write"):
        artifact_state("gs://bucket/run")
    assert time.monotonic() - began < 5


def test_importing_artifacts_imports_nothing_heavy() -> None:
    heavy = ["torch", "fsspec", "gcsfs", "aiohttp", "numpy"]
    code = f"import sys, stages.artifacts; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_room_is_that_of_the_disk_where_a_folder_will_be(tmp_path: Path) -> None:
    free = free_bytes(str(tmp_path / "not" / "yet"))
    assert free is not None
    assert 0 < free <= shutil.disk_usage(tmp_path).total
    assert free_bytes("gs://bucket/x") is None
