from __future__ import annotations

import json
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from stages.artifacts import artifact_state, open_artifact
from stages.errors import EagleError
from stages.heads import load_head
from stages.progress import Reporter
from stages.train.config import TrainConfig
from stages.train.optimizer import learning_rate
from stages.train.stage import TrainResult, run
from stages.train.training import Training
from tests.train.synthetic import make_features, make_row

QUIET = Reporter(quiet=True)
LABELS = 40
"""Tokens that are labels at all."""


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [make_row([0] * 4 + [1] * (20 + n % 7), seed=n, row_id=n, tokens=LABELS) for n in range(12)]
    return make_features(tmp_path_factory.mktemp("train") / "features", [rows[:7], rows[7:]])


def make_config(features: str, output: Path, **settings: object) -> TrainConfig:
    defaults = {
        "device": "cpu",
        "batch_tokens": 64,
        "epochs": 6,
        "lr": 3e-3,
        "holdout": 0.1,
        "draft_vocab_size": LABELS,
    }
    return TrainConfig.model_validate({"features": features, "output": str(output)} | defaults | settings)


class Recorder(Reporter):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)


def test_a_few_rows_are_learnt_by_heart(features: str, tmp_path: Path):
    run(make_config(features, tmp_path / "head", epochs=30, batch_tokens=128, lr=1e-2), QUIET)
    lines = [json.loads(line) for line in (tmp_path / "head/metrics.jsonl").read_text().splitlines()]
    losses = [line for line in lines if "loss" in line]
    assert max(losses[0]["agreement"]) < 0.2
    assert min(losses[-1]["agreement"]) > 0.85
    assert max(losses[-1]["loss"]) < min(losses[0]["loss"])


def test_the_artifact_is_a_head_that_loads_with_its_measures(features: str, tmp_path: Path):
    result = run(make_config(features, tmp_path / "head", draft_vocab_size=64, eval_steps=4), QUIET)
    artifact = open_artifact(str(tmp_path / "head"), "head")
    manifest = artifact.manifest
    assert {file.path for file in manifest.files} == {
        "config.json", "metrics.json", "metrics.jsonl", "model.safetensors", "draft/parity.safetensors",
        "training.svg", "README.md",
    }  # fmt: skip
    assert [parent.kind for parent in manifest.parents] == ["features"]
    assert manifest.target == open_artifact(features, "features").manifest.target
    head = load_head(artifact, dtype=torch.float32, device="cpu")
    assert head.config.draft_vocab_size == 64
    assert head.config.torch_dtype == "bfloat16"
    assert result.parameters == sum(p.numel() for p in head.parameters() if p is not head.embed_tokens.weight)
    assert result.holdout_rows == 1
    assert result.train_rows == 11
    assert len(result.holdout_agreement) == 4
    held_out = manifest.counts["holdout"]
    assert held_out["tree"]["tokens_per_step"] >= held_out["tokens_per_step"] >= 1
    assert 1 <= result.holdout_tokens_per_step <= 5
    again = run(make_config(features, tmp_path / "head", draft_vocab_size=64, eval_steps=4), QUIET)
    assert again == result.model_copy(update={"seconds": 0.0})
    assert "already complete" in again.summary()


@pytest.mark.parametrize(
    ("dtype", "stopped_by", "continues_after"), [("float32", "death", 15), ("bfloat16", "signal", 18)]
)
def test_a_run_that_was_stopped_ends_in_the_same_weights(
    features: str,
    tmp_path: Path,
    dtype: str,
    stopped_by: str,
    continues_after: int,
    monkeypatch: pytest.MonkeyPatch,
):
    seconds = 0 if stopped_by == "death" else 1000
    settings = {"dtype": dtype, "eval_every": 15, "checkpoint_seconds": seconds, "keep_last": 2, "loss": "lk"}
    whole = run(make_config(features, tmp_path / "whole", **settings), QUIET)
    assert whole.steps > 20
    take_step = Training.step

    def stopped_at_step_17(training: Training, batches: object, number: int) -> object:
        if number == 17 and stopped_by == "death":
            raise KeyboardInterrupt
        if number == 17:
            signal.raise_signal(signal.SIGINT)  # the step is done all the same, and saved
        return take_step(training, batches, number)

    monkeypatch.setattr(Training, "step", stopped_at_step_17)
    with pytest.raises(KeyboardInterrupt):
        run(make_config(features, tmp_path / "stopped", **settings), QUIET)
    assert artifact_state(str(tmp_path / "stopped")) == "partial"
    monkeypatch.undo()
    report = Recorder()
    result = run(make_config(features, tmp_path / "stopped", **settings), report)
    assert f"training continues after step {continues_after} of {whole.steps}" in report.lines
    assert (tmp_path / "stopped/model.safetensors").read_bytes() == (
        tmp_path / "whole/model.safetensors"
    ).read_bytes()
    assert measures(result) == measures(whole)
    assert lines_without_time(tmp_path / "stopped") == lines_without_time(tmp_path / "whole")
    assert not list((tmp_path / "stopped").glob("checkpoint*"))


def measures(result: TrainResult) -> dict[str, object]:
    return result.model_dump(exclude={"output", "seconds", "waiting"})


def lines_without_time(head: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (head / "metrics.jsonl").read_text().splitlines()]
    return [line | {"seconds": None, "waited": None} for line in lines]


def test_an_unfinished_run_with_other_settings_is_not_continued(
    features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Training, "step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(make_config(features, tmp_path / "head"), QUIET)
    monkeypatch.undo()
    with pytest.raises(EagleError, match="--overwrite"):
        run(make_config(features, tmp_path / "head", lr=1e-3), QUIET)
    assert (
        run(make_config(features, tmp_path / "head", lr=1e-3, overwrite=True, max_steps=3), QUIET).steps == 3
    )


def test_a_changed_byte_stops_training_where_it_is_read_if_digests_are_compared(tmp_path: Path):
    rows = [make_row([0] * 4 + [1] * 20, seed=n, row_id=n) for n in range(6)]
    uri = make_features(tmp_path / "features", [rows[:2], rows[2:4], rows[4:]])
    last = tmp_path / "features" / open_artifact(uri, "features").manifest.shards[1].path
    with last.open("r+b") as file:
        file.seek(-2000, 2)  # among the states
        file.write(b"\0\0\0\0")
    settings = {"window_bytes": 1, "holdout": 0, "epochs": 1, "draft_vocab_size": 0}
    with pytest.raises(EagleError, match=r"does not match its digest.*extract-features"):
        run(make_config(uri, tmp_path / "head", **settings), QUIET)
    assert artifact_state(str(tmp_path / "head")) == "partial"
    assert run(make_config(uri, tmp_path / "head", **settings, verify="off"), QUIET).steps > 1


def test_a_loss_that_is_not_finite_stops_with_step_and_advice(tmp_path: Path):
    row = make_row([0] * 4 + [1] * 20, seed=0)
    row.aux[10] = torch.inf
    uri = make_features(tmp_path / "features", [[row]])
    with pytest.raises(EagleError, match=r"at step 1 the loss is nan.*--lr"):
        run(make_config(uri, tmp_path / "head"), QUIET)


def test_a_draft_vocabulary_that_covers_little_is_warned_about(features: str, tmp_path: Path):
    report = Recorder()
    run(make_config(features, tmp_path / "head", draft_vocab_size=20, max_steps=1), report)
    assert any(line.startswith("warning:") and "--draft-vocab-size above 20" in line for line in report.lines)
    with pytest.raises(EagleError, match=r"4 tokens \d\d% of the answers' tokens can never.*automatic"):
        run(make_config(features, tmp_path / "other", draft_vocab_size=4, max_steps=1), report)


def test_a_head_is_no_features(features: str, tmp_path: Path):
    run(make_config(features, tmp_path / "head", max_steps=1), QUIET)
    with pytest.raises(EagleError, match="features"):
        run(make_config(str(tmp_path / "head"), tmp_path / "other"), QUIET)


def test_the_learning_rate_rises_then_falls_to_nothing():
    rates = [learning_rate(step, 100, 1.0, 0.05, "cosine") for step in range(100)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert all(a > b for a, b in pairwise(rates[5:]))
    assert rates[-1] < 0.001
