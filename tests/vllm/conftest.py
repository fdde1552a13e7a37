"""What the tests here share: questions with the target's own greedy answers, and heads trained on them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from stages.artifacts import open_artifact
from stages.artifacts.conversations import Conversation, read_conversations
from stages.extract_features import stage as extract_features
from stages.extract_features.config import ExtractFeaturesConfig
from stages.gen_data import stage as gen_data
from stages.gen_data.config import GenDataConfig
from stages.heads import HeadKind
from stages.progress import Reporter
from stages.targets import Target, load_target
from stages.train import stage as train
from stages.train.config import TrainConfig
from tests.tiny import write_jsonl

TARGET = "builtin:smollm2"
CONTEXT = 512
NEW_TOKENS = 40
LESSONS = 24
"""Further prompts that the head learns from."""


@dataclass(frozen=True)
class Questions:
    """A prompt file: single questions, and two that are followed up."""

    path: Path

    def answered(self, output: Path, *more_prompts: str, **settings: object) -> list[Conversation]:
        """The rows that gen-data makes of them, in float32; of these questions only."""
        fields = {
            "target": TARGET,
            "prompts": [str(self.path), *more_prompts],
            "output": str(output),
            "device": "cpu",
            "dtype": "float32",
            "max_new_tokens": NEW_TOKENS,
            "max_model_len": CONTEXT,
            "batch_size": 8,
            "pii": "off",
        }
        gen_data.run(GenDataConfig(**(fields | settings)), Reporter(quiet=True))  # type: ignore[arg-type]
        rows = read_conversations(open_artifact(str(output), "conversations"))
        return [row for row in rows if row.source == str(self.path)]


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Questions:
    single = [
        {"prompt": "Why is the sky blue?"},
        {"prompt": "Name three colours."},
        {"prompt": "What is 12 times 12?"},
        {"prompt": "Write a haiku about rain \u2614 in spring."},
    ]
    double = [
        {"turns": ["Who wrote Hamlet?", "In which century?"]},
        {"turns": ["Say hello in French.", "And in Spanish?"]},
    ]
    folder = tmp_path_factory.mktemp("prompts")
    return Questions(write_jsonl(folder / "prompts.jsonl", [*single, *double]))


@pytest.fixture(scope="session")
def target() -> Target:
    return load_target(TARGET, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def lessons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lessons")


@pytest.fixture(scope="session")
def expected(questions: Questions, lessons: Path) -> list[Conversation]:
    """The answers of transformers; made together with others that a head can learn from."""
    settings = {"max_prompts": 6 + LESSONS, "batch_size": 32}
    return questions.answered(lessons / "conversations", "builtin:chat", **settings)


@dataclass(frozen=True)
class Teacher:
    """Trains heads that have seen few answers many times."""

    features: str
    folder: Path

    def head(self, kind: HeadKind) -> str:
        """A head that knows its lessons: a minute on two cores, the first time that it is asked for."""
        output = self.folder / f"{kind}-head"
        config = TrainConfig(
            features=self.features,
            output=str(output),
            head=kind,
            device="cpu",
            epochs=16,
            batch_tokens=128,
            optimizer="adamw",  # for so few tokens a step Muon takes longer than all the rest
            holdout=0.1,  # so that the head has its record of them, which engines must not take for weights
            parity_rows=0,
            eval_every=10_000,  # at the end only: it is to know its lessons, not what is held out
        )
        train.run(config, Reporter(quiet=True))  # a finished one is taken as it is
        return str(output)


@pytest.fixture(scope="session")
def teacher(expected: list[Conversation], lessons: Path) -> Teacher:
    """It teaches the expected answers, and others."""
    extract_features.run(
        ExtractFeaturesConfig(
            target=TARGET,
            conversations=str(lessons / "conversations"),
            output=str(lessons / "features"),
            device="cpu",
            last="all",  # which EAGLE-1 and Medusa heads learn from
        ),
        Reporter(quiet=True),
    )
    return Teacher(str(lessons / "features"), lessons)
