"""Where artifacts can live: a local folder, memory, and a server of Google Cloud Storage's API."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from stages.artifacts import uri as uri_module
from tests.gcs.server import GcsServer

_numbers = itertools.count()


@pytest.fixture
def gcs(gcs_server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> GcsServer:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server.url)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setattr(uri_module, "_reached", set())
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
