"""Claims about which tokens are run, in which batches, and which of these make a shard."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.features.layout import supervised_positions
from stages.features.plan import WINDOW, KeptRow, Plan, keep, length_batches, plan_batches
from stages.features.storage import StorageFormat
from stages.features.token_rows import TokenRow

STORAGE = StorageFormat(torch.bfloat16)


def mask(text: str) -> np.ndarray:
    return np.array([int(c) for c in text], dtype=np.uint8)


def test_a_row_ends_at_its_last_label() -> None:
    assert keep(mask("001110000"), 100) == KeptRow(5, 2, "whole")
    assert keep(mask("0011100110"), 100) == KeptRow(9, 3, "whole")
    assert keep(mask("00111"), 100) == KeptRow(5, 2, "whole")


@pytest.mark.parametrize("row", ["00100100", "0", "1", "11", ""])
def test_a_row_without_a_label_is_skipped(row: str) -> None:
    assert keep(mask(row), 100) == KeptRow(0, 0, "skipped")


@pytest.mark.parametrize(
    ("row", "limit", "expected"),
    [
        ("001110011110", 12, KeptRow(11, 5, "whole")),  # it fits, its end of turn is behind the last label
        ("001110011110", 11, KeptRow(11, 5, "clipped")),  # what is cut off is behind both answers
        ("001110011110", 10, KeptRow(5, 2, "clipped")),  # the second answer does not fit as a whole
        ("00111001111", 10, KeptRow(5, 2, "clipped")),
        ("0011111111", 6, KeptRow(6, 3, "clipped")),  # not even the first answer fits: cut within it
        (
            "0010011111",
            7,
            KeptRow(7, 1, "clipped"),
        ),  # nor does an answer of one token count, as it has no label
        ("0011111111", 3, KeptRow(0, 0, "skipped")),
    ],
)
def test_a_long_row_ends_with_the_last_whole_answer_that_fits(
    row: str, limit: int, expected: KeptRow
) -> None:
    assert keep(mask(row), limit) == expected


def test_long_rows_can_be_dropped_instead() -> None:
    assert keep(mask("001110011110"), 11, "drop") == KeptRow(0, 0, "dropped")
    assert keep(mask("001110011110"), 12, "drop") == KeptRow(11, 5, "whole")


@given(st.text(alphabet="01", max_size=30), st.integers(3, 30), st.sampled_from(["clip", "drop"]))
def test_what_is_kept_fits_ends_with_a_label_and_is_counted(row: str, limit: int, long_rows: str) -> None:
    kept = keep(mask(row), limit, long_rows)
    assert kept.length <= limit
    part = torch.tensor(mask(row[: kept.length]))
    positions = supervised_positions(part, torch.tensor([0, len(part)]))
    assert len(positions) == kept.supervised
    assert (kept.length == 0) == (kept.fate in ("skipped", "dropped"))
    if kept.length:
        assert int(positions[-1]) == kept.length - 2
    whole = keep(mask(row), 100)
    if len(row) <= limit:
        assert kept == whole


def test_batches_hold_similar_lengths_longest_first() -> None:
    assert length_batches(range(6), [3, 9, 0, 4, 8, 3], forward_tokens=18) == [(1, 4), (3, 0, 5)]


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 100))
def test_every_row_with_tokens_runs_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = length_batches(range(len(lengths)), lengths, budget)
    assert sorted(i for batch in batches for i in batch) == [i for i, n in enumerate(lengths) if n]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


def rows(lengths: list[int]) -> list[TokenRow]:
    """Rows that are kept whole (all but lengths below 3, which are skipped)."""
    return [TokenRow(np.full(n, 7, np.int32), np.ones(n, np.uint8)) for n in lengths]


def plan(lengths: list[int], **settings: int) -> Plan:
    return plan_batches(rows(lengths), 100, 20, total=len(lengths), **settings)


def test_tokens_stop_before_the_row_that_does_not_fit_and_rows_behind_it_are_left_out() -> None:
    found = plan([5, 2, 6, 9, 3], max_tokens=19)
    assert [row.length for row in found.rows] == [5, 0, 6]
    assert found.counts() == {
        "rows": 2,
        "tokens": 11,
        "supervised_tokens": 7,
        "clipped_rows": 0,
        "dropped_rows": 0,
        "skipped_rows": 1,
        "left_out_rows": 2,
    }
    assert plan([5, 2, 6, 9, 3], max_tokens=20).tokens == 20
    assert plan([5, 2, 6, 9, 3], max_tokens=23).left_out == 0
    assert plan([5, 6], max_tokens=3).tokens == 5, "the first row in any case"


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 4000))
def test_shards_hold_all_batches_in_order_and_end_when_they_are_full(lengths: list[int], size: int) -> None:
    found = plan(lengths)
    shards = found.shards(8, STORAGE, size)
    assert [number for shard in shards for number in shard.batches] == list(range(len(found.batches)))
    for number, shard in enumerate(shards):
        held = [found.rows[i] for batch in shard.batches for i in found.batches[batch]]
        assert shard.sizes.rows == len(held)
        assert shard.sizes.tokens == sum(row.length for row in held)
        assert shard.sizes.supervised == sum(row.supervised for row in held)
        assert shard.sizes.bytes >= size or number + 1 == len(shards)
    bounds = [(shard.batches[0], shard.batches[-1]) for shard in found.shards(8, STORAGE, 1)]
    assert bounds == [(n, n) for n in range(len(found.batches))]


def test_rows_are_sorted_by_length_within_a_window_only() -> None:
    found = plan([3 + n % 7 for n in range(2 * WINDOW + 100)])
    windows = [{index // WINDOW for index in batch} for batch in found.batches]
    assert all(len(window) == 1 for window in windows)
    assert [min(window) for window in windows] == sorted(min(window) for window in windows)
