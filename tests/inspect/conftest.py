"""A run of the four stages on a tiny target, made once; tests that change something take a copy."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest

from eagle_cli.main import main
from tests.tiny import write_jsonl

TOPICS = ("rivers", "bridges", "lamps", "clouds", "violins", "maps", "kites")
SMALL = ("--device", "cpu", "--dtype", "float32", "--quiet")


def stage(*arguments: str) -> None:
    assert main([*arguments, *SMALL]) == 0


@pytest.fixture(scope="session")
def made(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run was made in: prompts.jsonl, and under run/ an artifact of each kind.

    The stages ran in that folder and were given relative paths, so the manifests hold those.
    """
    root = tmp_path_factory.mktemp("made")
    questions = [{"turns": [f"Tell me about {topic}.", "Go on."], "license": "CC0-1.0"} for topic in TOPICS]
    write_jsonl(root / "prompts.jsonl", questions)
    with contextlib.chdir(root):
        stage(
            "gen-data", "--target", tiny_path, "--prompts", "prompts.jsonl", "--pii", "off",
            "--max-new-tokens", "16", "--shard-rows", "3", "--output", "run/conversations",
        )  # fmt: skip
        stage(
            "extract-features", "--target", tiny_path, "--conversations", "run/conversations",
            "--forward-tokens", "128", "--shard-bytes", "150KB", "--output", "run/features",
        )  # fmt: skip
        stage(
            "train", "--features", "run/features", "--output", "run/head", "--epochs", "2",
            "--batch-tokens", "64", "--holdout", "0.2",
        )  # fmt: skip
        stage(
            "bench", "--target", tiny_path, "--head", "run/head", "--prompts", "prompts.jsonl",
            "--max-new-tokens", "8", "--num-prompts", "2", "--check-float32", "0", "--output", "run/bench",
        )  # fmt: skip
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run in another folder than it was made in, with that folder as the current one."""
    shutil.copytree(made / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return Path("run")
