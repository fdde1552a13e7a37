"""A tiny target, and a head of it."""

from __future__ import annotations

import pytest

from stages.heads import (
    Eagle3Config,
    Eagle3Head,
)
from stages.targets import Target, load_target
from tests.convert.heads import random_head
from tests.tiny import make_tiny_target


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_target(tmp_path_factory.mktemp("target"), vocab=300, hidden=32))


@pytest.fixture(scope="module")
def target(path: str) -> Target:
    return load_target(path, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def head(target: Target) -> Eagle3Head:
    """Random, with heads wider than the model divided by them, and RoPE of its own."""
    config = Eagle3Config.from_target(target.config, 40).model_copy(
        update={"head_dim": 16, "intermediate_size": 48, "rope_theta": 50000.0, "torch_dtype": "float32"}
    )
    return random_head(config, target)
