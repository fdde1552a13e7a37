"""Claims about which tokens are run and in which batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts.conversations import Conversation
from stages.features.plan import WINDOW, KeptRow, keep, length_batches, plan_batches
from stages.features.states import token_batches


def mask(text: str) -> list[int]:
    return [int(c) for c in text]


def test_a_row_ends_at_its_last_label() -> None:
    assert keep(mask("001110000"), 100) == KeptRow(length=5, supervised=2, clipped=False)
    assert keep(mask("0011100110"), 100) == KeptRow(length=9, supervised=3, clipped=False)
    assert keep(mask("00111"), 100) == KeptRow(length=5, supervised=2, clipped=False)


def test_a_row_whose_answers_are_single_tokens_is_dropped() -> None:
    assert keep(mask("00100100"), 100) == KeptRow(length=0, supervised=0, clipped=False)


def test_a_long_row_is_cut_and_ends_at_its_last_label_before_the_cut() -> None:
    assert keep(mask("0011110011"), 5) == KeptRow(length=5, supervised=2, clipped=True)
    assert keep(mask("0011110011"), 9) == KeptRow(length=6, supervised=3, clipped=True)
    assert keep(mask("0011110011"), 3) == KeptRow(length=0, supervised=0, clipped=True)
    assert keep(mask("0011110011"), 10) == KeptRow(length=10, supervised=4, clipped=False)


def test_batches_hold_similar_lengths_longest_first() -> None:
    assert length_batches(range(6), [3, 9, 0, 4, 8, 3], batch_tokens=18) == [(1, 4), (3, 0, 5)]


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 100))
def test_every_row_with_tokens_runs_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = length_batches(range(len(lengths)), lengths, budget)
    assert sorted(i for batch in batches for i in batch) == [i for i, n in enumerate(lengths) if n]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


def conversation(number: int) -> Conversation:
    answer = 1 + number % 4
    return Conversation(
        id=str(number),
        source="test",
        license="",
        category="",
        messages=[],
        input_ids=[number] * (3 + answer),
        loss_mask=[0] * 3 + [1] * answer,
        finish_reason="stop",
    )


ROWS = [conversation(number) for number in range(2 * WINDOW + 100)]
PLAN = plan_batches(ROWS, max_length=6, batch_tokens=70)


def test_batches_carry_the_tokens_of_their_rows() -> None:
    ids = {}
    for batch in token_batches(iter(ROWS), PLAN, skip=0):
        for row_id, start, end in zip(
            batch.row_ids, batch.row_offsets[:-1], batch.row_offsets[1:], strict=True
        ):
            ids[row_id] = batch.input_ids[start:end].tolist()
    assert ids == {i: row.input_ids[:6] for i, row in enumerate(ROWS) if sum(row.loss_mask) > 1}
    assert sum(len(tokens) for tokens in ids.values()) == PLAN.tokens


@pytest.mark.parametrize("skip", [1, 33, 34, 66, 70, 73])
def test_a_continued_run_sees_the_batches_that_are_left(skip: int) -> None:
    whole = list(token_batches(iter(ROWS), PLAN, skip=0))
    left = list(token_batches(iter(ROWS), PLAN, skip=skip))
    assert [batch.row_ids for batch in left] == [batch.row_ids for batch in whole[skip:]]
    assert [batch.input_ids.tolist() for batch in left] == [
        batch.input_ids.tolist() for batch in whole[skip:]
    ]
    done = sum(len(batch.input_ids) for batch in whole[:skip])
    assert PLAN.tokens_of(skip) == done
