from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages.artifacts import ArtifactWriter
from stages.decoding import EagleModel
from stages.heads import Eagle3Config, Eagle3Head, head_files
from stages.targets import Target, load_target
from tests.serve.running_server import RunningServer, running_server
from tests.tiny import make_tiny_target


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("serve") / "target")


@pytest.fixture(scope="session")
def target(tiny_folder: Path) -> Target:
    return load_target(str(tiny_folder), device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def plain(target: Target) -> EagleModel:
    """The target without a head: what every answer must equal."""
    return EagleModel(target)


# So many guesses that a random head is right now and then.
WIDE_TREE = "dynamic:depth=1,width=60,nodes=60,min_prob=0,expand_prob=0"


@pytest.fixture(scope="session")
def head_folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random head for the target, as an artifact."""
    folder = str(tmp_path_factory.mktemp("serve") / "head")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = Eagle3Head(Eagle3Config.from_target(target.config, 512))
    with ArtifactWriter.open(folder, "head", {}, target=target.fingerprint) as writer:
        for name, data in head_files(head).items():
            writer.add_file(name, data)
        writer.finish({})
    return folder


@pytest.fixture(scope="session")
def drafted(target: Target, head_folder: str) -> EagleModel:
    """The target with a draft head."""
    return EagleModel.from_pretrained(target, head_folder, tree=WIDE_TREE, max_batch=4)


@pytest.fixture(scope="session")
def server(drafted: EagleModel) -> Iterator[RunningServer]:
    with running_server(drafted) as running:
        yield running
