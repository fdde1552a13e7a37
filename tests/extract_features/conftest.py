"""A tiny target, and conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extract_features.extracting import (
    CONTEXT,
    MASKS,
    VOCAB,
    conversations,
)
from tests.tiny import make_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), vocab=VOCAB, hidden=32, max_length=CONTEXT)


@pytest.fixture(scope="module")
def source(target: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return conversations(tmp_path_factory.mktemp("source") / "conversations", target, MASKS)
