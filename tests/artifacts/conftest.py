"""Where artifacts can live: a local folder, memory, and Google Cloud Storage's API on a local socket."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.artifacts import uri as uri_module
from tests.artifacts.gcs_server import GcsServer, running_gcs_server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    with running_gcs_server() as server:
        yield server


@pytest.fixture
def gcs(gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> GcsServer:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.url)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setattr(uri_module, "_reached_buckets", set())
    return gcs_server


@pytest.fixture(params=["local", "memory", "gcs"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URI under which nothing exists yet; the cache folder is a fresh one too."""
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    if request.param == "local":
        return str(tmp_path / "runs")
    if request.param == "memory":
        return f"memory://runs-{next(_numbers)}"
    request.getfixturevalue("gcs")
    return f"gs://bucket/runs-{next(_numbers)}"
