from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.features.index import RowIndex
from stages.train.data import Batch, TrainingPlan, hold_out, plan_training


def make_index(conversations: int, rows_each: int = 1, per_shard: int = 10) -> list[RowIndex]:
    rows = [(c, 5 + c * 7 % 40) for c in range(conversations) for _ in range(rows_each)]
    return [RowIndex(i // per_shard, i % per_shard, c, 2 * n, n) for i, (c, n) in enumerate(rows)]


def batches_of(plan: TrainingPlan) -> list[Batch]:
    return [batch for window in plan.windows for batch in window.batches]


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


def test_what_is_held_out_is_the_beginning_of_the_same_choice_where_memory_bounds_it():
    rows = make_index(40)
    _, all_held = hold_out(rows, 0.5, seed=0)
    for most in (1, 100, 400):
        train, held = hold_out(rows, 0.5, seed=0, most_tokens=most)
        assert set(held) < set(all_held)
        assert len(held) == 1 or most - 90 < sum(row.tokens for row in held) <= most
        assert sorted([*train, *held], key=rows.index) == rows


def test_each_epoch_takes_every_row_once_in_another_order():
    rows = make_index(60)
    plan = plan_training(rows, [1] * 6, batch_tokens=100, epochs=2, seed=0, window_bytes=1000)
    batches = batches_of(plan)
    assert plan.steps == len(batches)
    first, second = batches[: plan.epoch_ends[0]], batches[plan.epoch_ends[0] :]
    for epoch in (first, second):
        assert sorted((row.shard, row.row) for batch in epoch for row in batch) == [
            (row.shard, row.row) for row in rows
        ]
        sizes = [sum(row.supervised for row in batch) for batch in epoch]
        assert all(50 <= size <= 150 for size in sizes)
    assert first != second
    assert plan == plan_training(rows, [1] * 6, batch_tokens=100, epochs=2, seed=0, window_bytes=1000)
    assert plan.tokens == 2 * sum(row.supervised for row in rows)


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    window_bytes=st.integers(1, 60),
    seed=st.integers(0, 5),
)
def test_the_shards_of_a_window_fit_into_it_and_come_once_an_epoch(
    sizes: list[int], window_bytes: int, seed: int
):
    rows = make_index(5 * len(sizes), per_shard=5)
    plan = plan_training(rows, sizes, batch_tokens=100, epochs=2, seed=seed, window_bytes=window_bytes)
    windows = [window.shards for window in plan.windows]
    for shards in windows:
        assert sum(sizes[shard] for shard in shards) <= window_bytes or len(shards) == 1
    assert sorted(shard for shards in windows for shard in shards) == sorted([*range(len(sizes))] * 2)


@given(steps=st.integers(1, 40), done=st.integers(0, 40))
def test_a_plan_that_is_cut_takes_the_same_steps(steps: int, done: int):
    whole = plan_training(make_index(60), [10] * 6, batch_tokens=100, epochs=2, seed=0, window_bytes=25)
    plan = whole.first(steps)
    assert batches_of(plan) == batches_of(whole)[:steps]
    assert plan.steps == min(steps, whole.steps)
    assert plan.epoch_ends == tuple(end for end in whole.epoch_ends if end <= steps)
    left = [batch for window in plan.after(done) for batch in window.batches]
    assert left == batches_of(whole)[done:steps]
