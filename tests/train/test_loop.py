from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts import open_artifact
from stages.errors import EagleError
from stages.features.index import RowIndex
from stages.heads import DraftHead, load_head
from stages.train.acceptance import Acceptance
from stages.train.batch import TttBatch, collate
from stages.train.chart import draw_chart
from stages.train.checkpoint import Progress
from stages.train.data import share_out
from stages.train.loss import StepLosses
from stages.train.optimizer import learning_rate
from stages.train.recompute import recompute_layers
from stages.train.stage import run
from stages.train.trackers import scalars, tracking
from stages.train.training import Training
from stages.train.unroll import unroll
from tests.train.chains import row_with_every_state
from tests.train.synthetic import make_features, make_head, make_row
from tests.train.test_stage import LABELS, QUIET, Recorder, lines_without_time, make_config


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [make_row([0] * 4 + [1] * (20 + n % 7), seed=n, row_id=n, tokens=LABELS) for n in range(12)]
    return make_features(tmp_path_factory.mktemp("train") / "features", [rows[:7], rows[7:]])


def lines_of(head: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (head / "metrics.jsonl").read_text().splitlines()]


def tensors_of(head: Path) -> dict[str, torch.Tensor]:
    loaded = load_head(open_artifact(str(head), "head"), dtype=torch.float32, device="cpu")
    return dict(loaded.named_parameters())


def assert_same_course(head: Path, other: Path) -> None:
    """The same numbers up to the order of additions."""
    for a, b in zip(lines_of(head), lines_of(other), strict=True):
        assert (b["step"], b["tokens"]) == (a["step"], a["tokens"])
        if "loss" in a:
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-3)
            assert b["counted"] == a["counted"]
        else:
            assert b["holdout"]["asked"] == a["holdout"]["asked"]
            overlaps = [line["holdout"]["sampled"]["overlap"] for line in (a, b)]
            assert overlaps[1] == pytest.approx(overlaps[0], rel=1e-2)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(1, 5), st.none() | st.integers(1, 80)
)
def test_each_row_goes_to_one_micro_batch_and_processes_get_about_as_much(
    sizes: list[int], ranks: int, micro: int | None
):
    batch = tuple(RowIndex(0, number, number, 2 * size, size) for number, size in enumerate(sizes))
    shares = share_out(batch, ranks, micro)
    assert sorted(row.row for share in shares for part in share for row in part) == [*range(len(sizes))]
    assert all(part for share in shares for part in share)
    totals = [sum(row.supervised for part in share for row in part) for share in shares]
    assert max(totals) - min(totals) <= max(sizes)
    for share in shares:
        for part in share:
            assert micro is None or sum(row.supervised for row in part) < micro + max(sizes)


@pytest.mark.parametrize("loss", ["cross-entropy", "lk"])
def test_micro_batches_train_like_the_whole_step(features: str, tmp_path: Path, loss: str):
    settings = {"dtype": "float32", "max_steps": 6, "batch_tokens": 128, "loss": loss}
    for name, micro in (("whole", None), ("micro", 30)):
        run(make_config(features, tmp_path / name, micro_batch_tokens=micro, **settings), QUIET)
    assert_same_course(tmp_path / "whole", tmp_path / "micro")
    for name, tensor in tensors_of(tmp_path / "whole").items():
        # Adam's first steps have the size of the learning rate whatever the gradient's, so rounding shows.
        assert (tensors_of(tmp_path / "micro")[name] - tensor).abs().max() < 2e-3, name


def test_the_head_that_was_best_on_held_out_rows_is_written_and_training_ends_when_it_gets_no_better(
    features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    worth = iter([1.0, 3.0, 2.0, 2.5, 9.0])
    weights: list[dict[str, torch.Tensor]] = []

    def judged(training: Training, batches: Any, steps: int) -> Acceptance:
        weights.append({n: p.detach().clone() for n, p in training.head.named_parameters()})
        one = torch.ones(1, dtype=torch.float64)
        accepted = torch.zeros(4, steps, dtype=torch.float64)
        accepted[0, 0] = next(worth) - 1
        return replace(Acceptance.none(steps), cycles=one.repeat(4), accepted=accepted)

    monkeypatch.setattr(Training, "evaluate", judged)
    report = Recorder()
    settings = {"eval_every": 4, "patience": 2, "dtype": "float32"}
    result = run(make_config(features, tmp_path / "head", **settings), report)
    assert (result.steps, result.best_step) == (16, 8)
    assert f"training ends at step 16 of 24: {result.ended_early}" in report.lines
    assert result.holdout_tokens_per_step == 3
    for name, tensor in tensors_of(tmp_path / "head").items():
        assert tensor.equal(weights[1][name]), name


def test_a_checkpoint_that_cannot_be_read_is_stood_in_for_by_the_one_before(
    features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = {"checkpoint_seconds": 0, "keep_last": 2}
    take_step = Training.step

    def stopped_at_step_23(training: Training, batches: object, number: int) -> object:
        if number == 23:
            raise KeyboardInterrupt
        return take_step(training, batches, number)

    monkeypatch.setattr(Training, "step", stopped_at_step_23)
    with pytest.raises(KeyboardInterrupt):
        run(make_config(features, tmp_path / "head", **settings), QUIET)
    monkeypatch.undo()
    files = sorted((tmp_path / "head").glob("checkpoint*"), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) == 2
    damaged = bytearray(files[-1].read_bytes())
    damaged[:8] = b"\xff" * 8
    files[-1].write_bytes(damaged)
    report = Recorder()
    run(make_config(features, tmp_path / "head", **settings), report)
    (line,) = [line for line in report.lines if line.startswith("training continues after step")]
    assert 0 < int(line.split()[4]) < 20


def test_a_head_continues_from_another_ones_weights(features: str, tmp_path: Path):
    run(make_config(features, tmp_path / "first", dtype="float32", holdout=0), QUIET)
    again = {"init_from": str(tmp_path / "first"), "draft_vocab_size": 0, "dtype": "float32", "holdout": 0}
    run(make_config(features, tmp_path / "second", lr=1e-12, max_steps=1, **again), QUIET)
    first = tensors_of(tmp_path / "first")
    for name, tensor in tensors_of(tmp_path / "second").items():
        torch.testing.assert_close(tensor, first[name], rtol=0, atol=1e-9)
    manifest = open_artifact(str(tmp_path / "second"), "head").manifest
    assert [parent.kind for parent in manifest.parents] == ["features", "head"]
    assert manifest.counts["draft_vocab_size"] == LABELS


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"draft_vocab_size": LABELS + 1}, r"--draft-vocab-size 41 is not that of .*first.*drafts 40"),
        ({"draft_vocab_size": 0, "norm_output": True}, r"does not fit.*norm_output is False, not True"),
        (
            {"draft_vocab_size": 0, "head_dim": 8},
            r"does not fit.*q_proj.weight has shape \(64, 64\), not \(32,",
        ),
        (
            {"draft_vocab_size": 0, "head_layers": 2},
            r"does not fit the head to train \(it lacks .*flags of its",
        ),
        ({"init": "target"}, "--init-from both say"),
    ],
)
def test_a_head_of_another_shape_is_refused(
    features: str, tmp_path: Path, settings: dict[str, Any], says: str
):
    run(make_config(features, tmp_path / "first", max_steps=1), QUIET)
    with pytest.raises((EagleError, ValueError), match=says):
        run(make_config(features, tmp_path / "second", init_from=str(tmp_path / "first"), **settings), QUIET)


def test_a_head_of_another_target_is_refused(features: str, tmp_path: Path):
    other = make_features(tmp_path / "features", [[make_row([0] * 4 + [1] * 40, seed=3)]], weights="1")
    run(make_config(other, tmp_path / "first", max_steps=1, holdout=0, draft_vocab_size=0), QUIET)
    with pytest.raises(EagleError, match=r"is a head of none.*another weights.*same target"):
        run(make_config(features, tmp_path / "second", init_from=str(tmp_path / "first")), QUIET)


def test_another_number_of_processes_does_not_continue(
    features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stop = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
    monkeypatch.setattr("stages.train.loop.Loop._evaluate", stop)
    monkeypatch.setattr("stages.train.checkpoint.Checkpoints.due", lambda _: True)
    monkeypatch.setattr("stages.train.stage.Progress", lambda **fields: Progress(**fields | {"processes": 4}))
    with pytest.raises(KeyboardInterrupt):
        run(make_config(features, tmp_path / "head", eval_every=15), QUIET)
    monkeypatch.undo()
    with pytest.raises(EagleError, match=r"is of 4 processes.*now there are 1: start 4 with torchrun"):
        run(make_config(features, tmp_path / "head", eval_every=15), QUIET)


def test_the_schedules_end_as_their_names_say():
    def rates(schedule: Any) -> list[float]:
        return [learning_rate(step, 100, 2.0, 0.1, schedule) for step in range(100)]

    assert rates("constant")[10:] == [2.0] * 90
    assert rates("wsd")[10:81] == [2.0] * 71
    assert rates("wsd")[80:] == pytest.approx([2.0 * (20 - n) / 20 for n in range(20)])
    assert all(each[:10] == rates("cosine")[:10] for each in (rates("constant"), rates("wsd")))


def test_a_tracker_that_is_not_installed_is_named_with_what_to_install(
    features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(EagleError, match=r"--track wandb.*eagle-decoding\[wandb\]"):
        run(make_config(features, tmp_path / "head", track="wandb", max_steps=1), QUIET)


def test_trackers_get_every_line_as_plain_numbers(monkeypatch: pytest.MonkeyPatch):
    line = {"step": 4, "loss": [2.0, 3.0], "holdout": {"sampled": {"overlap": [0.5]}, "cycles": 7}}
    expected = {
        "step": 4,
        "loss/1": 2.0,
        "loss/2": 3.0,
        "holdout/sampled/overlap/1": 0.5,
        "holdout/cycles": 7,
    }
    assert scalars(line) == expected
    sent: list[Any] = []

    class Wandb:
        def init(self, **settings: Any) -> Wandb:
            sent.append(settings)
            return self

        def log(self, values: Any, step: int) -> None:
            sent.append((values, step))

        def finish(self) -> None:
            sent.append("finished")

    monkeypatch.setitem(__import__("sys").modules, "wandb", Wandb())
    for output in ("runs/a/head", "runs/b/head/"):
        with tracking("wandb", output, {"lr": 1}) as track:
            track(line)
    assert [each["name"] for each in sent[::3]] == ["a-head", "b-head"]
    assert sent[0]["id"] != sent[3]["id"]
    assert sent[0]["config"] == {"lr": 1}
    assert sent[1:3] == [(expected, 4), "finished"]


def test_the_chart_is_a_picture_of_every_line(features: str, tmp_path: Path):
    run(make_config(features, tmp_path / "head"), QUIET)
    picture = ElementTree.fromstring((tmp_path / "head/training.svg").read_text())
    lines = picture.findall(".//{*}polyline")
    assert len(lines) == 3 + 2 * 3 + 3
    log = lines_of(tmp_path / "head")
    points = sum(len(line.get("points", "").split()) for line in lines)
    assert points == 6 * sum("loss" in line for line in log) + 6 * sum("holdout" in line for line in log)
    assert "nothing was measured" in draw_chart([], "none <at> all")


def test_recomputing_layers_keeps_less_and_trains_the_same(features: str, tmp_path: Path):
    settings = {"max_steps": 4, "head_layers": 2, "parity_rows": 0}
    for name in ("kept", "recomputed"):
        run(make_config(features, tmp_path / name, recompute=name == "recomputed", **settings), QUIET)
    assert lines_without_time(tmp_path / "recomputed") == lines_without_time(tmp_path / "kept")
    for name, tensor in tensors_of(tmp_path / "kept").items():
        assert tensor.equal(tensors_of(tmp_path / "recomputed")[name]), name
    head, batch = make_head(), collate([make_row([0] * 4 + [1] * 30, seed=0)], 3)
    sizes = [kept_bytes(head, batch)]
    recompute_layers(head)
    sizes.append(kept_bytes(head, batch))
    assert sizes[1] < 0.7 * sizes[0]


def kept_bytes(head: DraftHead, batch: TttBatch) -> int:
    """Of distinct tensors that the backward pass of an unroll holds."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        unrolled = unroll(head, batch, 3)
    assert unrolled.states.requires_grad
    return sum(kept.values()) - sum(p.nbytes for p in head.parameters())


@pytest.fixture(scope="module")
def every_state(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Features with the last state of every token."""
    rows = [row_with_every_state([0] * 4 + [1] * (20 + n % 7), seed=n) for n in range(12)]
    rows = [replace(row, row_id=n) for n, row in enumerate(rows)]
    return make_features(tmp_path_factory.mktemp("train") / "features", [rows[:7], rows[7:]])


@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_heads_of_other_kinds_are_trained_alike_and_continue_bit_for_bit(
    every_state: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    settings = {"head": kind, "epochs": 2, "micro_batch_tokens": 40, "draft_vocab_size": 96, "loss": "lk"}
    whole = run(make_config(every_state, tmp_path / "whole", **settings), QUIET)
    take_step = Training.step

    def stopped_at_step_5(training: Training, batches: Any, number: int) -> StepLosses:
        if number == 5:
            signal.raise_signal(signal.SIGINT)
        return take_step(training, batches, number)

    monkeypatch.setattr(Training, "step", stopped_at_step_5)
    with pytest.raises(KeyboardInterrupt):
        run(make_config(every_state, tmp_path / "stopped", **settings), QUIET)
    monkeypatch.undo()
    result = run(make_config(every_state, tmp_path / "stopped", **settings), QUIET)
    assert (result.steps, result.head, len(result.holdout_agreement)) == (whole.steps, kind, 3)
    stopped, expected = (tmp_path / name / "model.safetensors" for name in ("stopped", "whole"))
    assert stopped.read_bytes() == expected.read_bytes()
    losses = [line["loss"][0] for line in lines_of(tmp_path / "whole") if "loss" in line]
    assert losses[-1] < losses[0]


def test_features_without_every_last_state_are_refused_before_anything_is_written(
    features: str, every_state: str, tmp_path: Path
):
    config = make_config(every_state, tmp_path / "head", head="eagle1", draft_vocab_size=96)
    config = config.model_copy(update={"features": [every_state, features]})
    with pytest.raises(EagleError, match=rf"every token, and {features} has it .* extract with --last all"):
        run(config, QUIET)
    assert not (tmp_path / "head").exists()
