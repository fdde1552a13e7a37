from __future__ import annotations

import random
import string
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import EagleError
from stages.gen_data.exclusion import Exclusion, allowed, word_runs
from stages.gen_data.tally import Tally
from stages.prompts import Prompt, read_prompts
from tests.tiny import write_jsonl

PROMPT = Prompt("1", ("a", "b"), "s")


def source(tmp_path, name: str, rows) -> str:
    return str(write_jsonl(tmp_path / f"{name}.jsonl", rows))


BENCHMARK = [
    {
        "turns": [
            "A baker sells 12 loaves an hour at 3 dollars each. How much does she earn in 8 hours?",
            "Why?",
        ]
    },
    {"prompt": "Write a haiku."},
]


@pytest.mark.parametrize(
    ("turn", "excluded"),
    [
        (BENCHMARK[0]["turns"][0], True),
        (BENCHMARK[0]["turns"][0].upper().replace("?", " ?!"), True),
        (f"Solve this and show your work.\n\n{BENCHMARK[0]['turns'][0]}\n\nThink first.", True),
        ("A baker sells 15 loaves an hour at 3 dollars each. How much does she earn in 8 hours?", True),
        ("A tailor makes 5 coats a week for 90 dollars each. How much does he earn in 8 weeks?", False),
        ("Write a haiku.", True),
        ("Write a haiku about rain.", False),
        ("Why?", False),
    ],
)
def test_prompts_that_contain_a_benchmarks_are_left_out(tmp_path, turn, excluded):
    exclusion = Exclusion.of([source(tmp_path, "benchmark", BENCHMARK)], 0.2)
    tally = Tally()
    kept = list(allowed([replace(PROMPT, turns=("Hello there", turn))], exclusion, tally))
    assert (not kept) == excluded
    assert tally.total("excluded") == excluded


def test_the_built_in_evaluation_excludes_nothing_of_the_built_in_training_prompts():
    exclusion = Exclusion.of(["builtin:eval"], 0.2)
    assert not [prompt for prompt in read_prompts("builtin:chat") if exclusion.holds(prompt)]
    assert all(exclusion.holds(prompt) for prompt in read_prompts("builtin:eval"))


@pytest.mark.parametrize(
    ("turn", "excluded"),
    [
        (
            "\uff34\uff48\uff45 quick brown fox jumps over the lazy cafe\u0301 cat",
            True,
        ),  # full width, and two letters for one
        ("the quick brown fox jumps over the lazy caf\u00e9 cat", True),
        ("\u732b\u306f\u3069\u3053\u3067\u5bdd\u3066\u3044\u307e\u3059\u304b\uff1f", True),
        ("\u72ac\u306f\u3044\u3064\u98ef\u3092\u98df\u3079\u307e\u3059\u304b\uff1f", False),
    ],
)
def test_a_benchmark_is_found_in_any_script_and_spelling(tmp_path, turn, excluded):
    rows = [
        {"prompt": "The quick brown fox jumps over the lazy caf\u00e9 cat"},
        {"prompt": "\u732b\u306f\u3069\u3053\u3067\u5bdd\u3066\u3044\u307e\u3059\u304b"},
        {"prompt": "\U0001f44d"},
    ]
    exclusion = Exclusion.of([source(tmp_path, "benchmark", rows)], 0.2)
    assert exclusion.holds(replace(PROMPT, turns=(turn,))) == excluded


WORDS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=14)


@given(st.lists(WORDS, max_size=6), st.lists(WORDS, min_size=1, max_size=3))
def test_looking_up_the_rarest_runs_finds_what_comparing_all_finds(texts, turns):
    def runs(words: list[str]) -> set:
        return (
            {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}
            if len(words) > 4
            else {("whole", *words)}
        )

    own = set().union(*map(runs, turns))
    expected = any(len(runs(text) & own) >= 0.6 * len(runs(text)) for text in texts)
    exclusion = Exclusion([word_runs(text) for text in texts])
    assert exclusion.holds(replace(PROMPT, turns=tuple(map(" ".join, turns)))) == expected


def test_a_benchmark_whose_questions_begin_alike_is_looked_through_quickly():
    rng = random.Random(0)
    begin = "the following are questions with four answers each of which one is right say which it is "
    texts = [f"{begin}{' '.join(rng.choices(string.ascii_lowercase, k=40))}".split() for _ in range(3000)]
    exclusion = Exclusion([word_runs(text) for text in texts])
    start = time.monotonic()
    assert all(exclusion.holds(replace(PROMPT, turns=(" ".join(text),))) for text in texts[:300])
    assert not exclusion.holds(replace(PROMPT, turns=(begin + "z " * 40,)))
    assert time.monotonic() - start < 3  # comparing each with all takes ten times as long


def test_a_benchmark_that_cannot_be_read_is_refused_and_not_let_through(tmp_path):
    unread = source(tmp_path, "unread", [{"prompt": "a"}, {"x": 1}, {"x": 2}])
    with pytest.raises(
        EagleError, match=r"2 of 3 rows are no prompts.*--exclude .*unread\.jsonl would let them through"
    ):
        Exclusion.of([unread], 0.5)
    Exclusion.of([unread], 0.7)
