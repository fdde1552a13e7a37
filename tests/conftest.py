"""Fixtures shared by all tests: tiny targets made once a session."""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

from stages.targets import Target, load_target
from tests.tiny import make_tiny_target


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_target(tmp_path_factory.mktemp("target") / "tiny"))


@pytest.fixture(scope="session")
def tiny_target(tiny_path: str) -> Target:
    """A random Llama of 8 layers in float32."""
    return load_target(tiny_path, device="cpu", dtype="float32")
