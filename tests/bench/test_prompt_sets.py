"""Claims about the names of prompt sets and the choice of prompts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.bench.measure import spread
from stages.bench.prompt_sets import (
    PromptSet,
    by_answer_length,
    by_prompt_length,
    opening,
    read_prompt_sets,
    set_names,
)
from stages.prompts import Prompt
from tests.tiny import write_jsonl


def test_sets_are_named_after_their_source() -> None:
    sources = ["builtin:eval", "data/gsm8k.jsonl", "gs://bucket/x/mt_bench.PARQUET", "owner/alpaca.v2"]
    assert set_names(sources) == ["eval", "gsm8k", "mt_bench", "alpaca.v2"]


def test_no_two_sets_have_the_same_name() -> None:
    names = set_names(["a/eval.jsonl", "eval-2.jsonl", "builtin:eval", "a/eval.jsonl"])
    assert names == ["eval", "eval-2", "eval-3", "eval-4"]


def test_a_changed_prompt_changes_the_identity_of_its_set(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "p.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    write_jsonl(tmp_path / "q.jsonl", [{"prompt": "one"}, {"prompt": "too"}])
    first, second = read_prompt_sets([str(tmp_path / "p.jsonl"), str(tmp_path / "q.jsonl")], limit=None)
    assert first.identity()["prompts"] == second.identity()["prompts"] == 2
    assert first.identity()["sha256"] != second.identity()["sha256"]
    (again,) = read_prompt_sets([str(tmp_path / "p.jsonl")], limit=1)
    assert again.identity()["prompts"] == 1


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20),
    st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True),
)
def test_every_prompt_is_in_the_one_part_that_its_length_names(lengths: list[int], bounds: list[int]) -> None:
    prompts = tuple(Prompt(id=str(n), turns=("w " * n, "x"), source="s") for n in lengths)
    bounds.sort()
    parts = by_prompt_length([PromptSet("eval", "s", prompts)], bounds, lambda text: len(text.split()))
    assert sorted(each.id for part in parts for each in part.prompts) == sorted(map(str, lengths))
    edges = {f"eval prompt<={most}": (least, most) for least, most in pairwise([0, *bounds])}
    edges[f"eval prompt>{bounds[-1]}"] = (bounds[-1], 99)
    for part in parts:
        least, most = edges[part.name]
        assert all(least < int(prompt.id) <= most for prompt in part.prompts)


def test_several_lengths_of_answers_make_sets_of_their_own() -> None:
    sets = [PromptSet("a", "s", ()), PromptSet("b", "s", ())]
    assert [(each.name, each.max_new_tokens) for each in by_answer_length(sets, [8, 32])] == [
        ("a answer<=8", 8),
        ("b answer<=8", 8),
        ("a answer<=32", 32),
        ("b answer<=32", 32),
    ]
    assert [(each.name, each.max_new_tokens) for each in by_answer_length(sets, [9])] == [("a", 9), ("b", 9)]


def test_a_system_message_opens_the_conversation() -> None:
    prompt = Prompt(id="1", turns=("hello", "more"), source="s", system="be brief")
    assert opening(prompt) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]


@pytest.mark.parametrize(
    ("total", "count", "chosen"), [(80, 4, [10, 30, 50, 70]), (3, 9, [0, 1, 2]), (5, 0, []), (0, 4, [])]
)
def test_checked_prompts_are_spread_evenly(total: int, count: int, chosen: list[int]) -> None:
    assert spread(total, count) == chosen
