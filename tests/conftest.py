"""Fixtures shared by all tests, each made once a session: tiny targets, a storage server, quick processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from stages.targets import Target, load_target
from tests.faults.eagle_process import EagleProcesses, eagle_processes
from tests.gcs.server import GcsServer, running_gcs_server
from tests.tiny import make_tiny_target


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_target(tmp_path_factory.mktemp("target") / "tiny"))


@pytest.fixture(scope="session")
def tiny_target(tiny_path: str) -> Target:
    """A random Llama of 8 layers in float32."""
    return load_target(tiny_path, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[GcsServer]:
    """The API of Google Cloud Storage on loopback, with a bucket named "bucket"."""
    with running_gcs_server() as server:
        yield server


@pytest.fixture(scope="session")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EagleProcesses]:
    """Starts `eagle` commands as processes that begin at once."""
    with eagle_processes(tmp_path_factory.mktemp("eagle")) as processes:
        yield processes
