from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.artifacts import open_artifact
from stages.errors import EagleError
from stages.train import data
from stages.train.data import FeatureRows, RowIndex, hold_out, plan_training
from tests.train.synthetic import VOCAB, make_features, make_row


def make_index(conversations: int, rows_each: int = 1, per_shard: int = 10) -> list[RowIndex]:
    rows = [(c, 5 + c * 7 % 40) for c in range(conversations) for _ in range(rows_each)]
    return [RowIndex(i // per_shard, i % per_shard, c, tokens) for i, (c, tokens) in enumerate(rows)]


def test_whole_conversations_are_held_out_the_same_ones_for_a_seed():
    rows = make_index(40, rows_each=3)
    train, held = hold_out(rows, 0.1, seed=0)
    assert len({row.row_id for row in held}) == 4
    assert len(held) == 12
    assert not {row.row_id for row in held} & {row.row_id for row in train}
    assert hold_out(rows[::-1], 0.1, seed=0)[1] == held[::-1]
    assert hold_out(rows, 0.1, seed=1)[1] != held


@pytest.mark.parametrize(
    ("conversations", "share", "held"), [(1, 0.5, 0), (2, 0.01, 1), (3, 0.99, 2), (9, 0, 0)]
)
def test_something_is_held_out_if_asked_for_and_never_everything(conversations: int, share: float, held: int):
    assert len(hold_out(make_index(conversations), share, seed=0)[1]) == held


def test_each_epoch_takes_every_row_once_in_another_order():
    rows = make_index(60)
    plan = plan_training(rows, [1] * 6, batch_tokens=100, epochs=2, seed=0)
    batches = [batch for window in plan.windows for batch in window]
    assert plan.steps == len(batches)
    first, second = batches[: plan.epoch_ends[0]], batches[plan.epoch_ends[0] :]
    for epoch in (first, second):
        assert sorted((row.shard, row.row) for batch in epoch for row in batch) == [
            (row.shard, row.row) for row in rows
        ]
        sizes = [sum(row.supervised for row in batch) for batch in epoch]
        assert all(50 <= size <= 150 for size in sizes)
    assert first != second
    assert plan == plan_training(rows, [1] * 6, batch_tokens=100, epochs=2, seed=0)
    assert plan.tokens(plan.steps) == 2 * sum(row.supervised for row in rows)


def test_shards_that_do_not_fit_together_are_not_open_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "WINDOW_BYTES", 25)
    plan = plan_training(make_index(60), [10] * 6, batch_tokens=100, epochs=1, seed=0)
    shards = [{row.shard for batch in window for row in batch} for window in plan.windows]
    assert [len(window) for window in shards] == [2, 2, 2]
    assert set().union(*shards) == set(range(6))


def test_batches_skipped_are_those_taken_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data, "WINDOW_BYTES", 1)
    shards = [
        [make_row([0, 0] + [1] * n, seed=n, row_id=n) for n in range(5 * s + 3, 5 * s + 8)] for s in range(3)
    ]
    rows = FeatureRows.of(open_artifact(make_features(tmp_path / "features", shards), "features"))
    plan = plan_training(rows.rows, rows.sizes, batch_tokens=20, epochs=2, seed=0)
    whole = [[row.row_id for row in batch] for batch in rows.batches(plan.windows)]
    assert len(whole) == plan.steps
    for skip in (0, 3, plan.epoch_ends[0], plan.steps):
        assert [[row.row_id for row in batch] for batch in rows.batches(plan.windows, skip)] == whole[skip:]


def test_labels_are_counted_at_supervised_positions(tmp_path: Path):
    row = make_row([0, 1, 1, 1, 0, 1, 1], seed=0)
    rows = FeatureRows.of(open_artifact(make_features(tmp_path / "features", [[row]]), "features"))
    counts = rows.label_counts(rows.rows, VOCAB)
    assert counts.equal(torch.bincount(row.input_ids[[2, 3, 6]], minlength=VOCAB))


def test_features_with_nothing_supervised_are_refused(tmp_path: Path):
    uri = make_features(tmp_path / "features", [[make_row([0, 0, 1, 0, 0], seed=0)]])
    with pytest.raises(EagleError, match="every loss mask is zero"):
        FeatureRows.of(open_artifact(uri, "features"))
