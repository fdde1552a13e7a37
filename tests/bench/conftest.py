from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.artifacts import ArtifactWriter
from stages.heads import Eagle3Config, Eagle3Head, head_files
from stages.targets import Target, load_target
from tests.tiny import make_tiny_target

VOCAB, CONTEXT = 300, 160


@pytest.fixture(scope="package")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "target"
    return make_tiny_target(folder, vocab=VOCAB, hidden=32, max_length=CONTEXT)


@pytest.fixture(scope="package")
def target(target_folder: Path) -> Target:
    return load_target(str(target_folder), device="cpu", dtype="float32")


@pytest.fixture(scope="package")
def head_uri(target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A head with random weights, which guesses right now and then."""
    uri = str(tmp_path_factory.mktemp("bench") / "head")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = Eagle3Head(Eagle3Config.from_target(target.config, VOCAB))
    with ArtifactWriter.open(uri, "head", {}, target=target.fingerprint) as writer:
        for name, data in head_files(head).items():
            writer.add_file(name, data)
        writer.finish({})
    return uri
