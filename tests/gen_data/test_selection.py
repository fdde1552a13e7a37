from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import EagleError
from stages.gen_data.selection import (
    Exclusion,
    Source,
    allowed,
    distinct,
    drawn,
    parse_licenses,
    parse_sources,
    prompts_digest,
    read_sources,
    shuffled,
    with_own_ids,
)
from stages.gen_data.selection_config import SelectionConfig
from stages.gen_data.tally import KEPT, Tally
from stages.prompts import Prompt, read_prompts
from tests.tiny import write_jsonl

PROMPT = Prompt("1", ("a", "b"), "s", category="c", license="l", system="y")


def source(tmp_path, name: str, rows) -> str:
    return str(write_jsonl(tmp_path / f"{name}.jsonl", rows))


def config(*prompts: str, **changes) -> SelectionConfig:
    return SelectionConfig(**({"prompts": list(prompts), "shuffle_buffer": 0} | changes))


def test_sources_take_turns_until_all_are_used_up(tmp_path):
    long = source(tmp_path, "long", [{"prompt": f"long {i}"} for i in range(4)])
    short = source(tmp_path, "short", [{"prompt": "short 0"}])
    order = [prompt.turns[0] for prompt in read_sources(config(long, short, long), 0, Tally())]
    assert order == ["long 0", "short 0", "long 1", "long 2", "long 3"]


def test_weights_decide_how_often_a_source_is_drawn_and_the_seed_decides_the_order():
    def first(seed: int) -> list[int]:
        streams = [iter(range(10_000)) for _ in range(3)]
        draws = drawn(streams, [1, 2, 5], random.Random(seed))
        return [next(draws)[0] for _ in range(8000)]

    counts = Counter(first(0))
    assert [round(counts[number] / 1000, 1) for number in range(3)] == pytest.approx([1, 2, 5], abs=0.2)
    assert first(0) == first(0) != first(1)


def test_a_source_that_is_used_up_is_drawn_no_more():
    assert Counter(number for number, _ in drawn([iter("ab"), iter("c" * 9)], [9, 1], random.Random(0))) == {
        0: 2,
        1: 9,
    }


@pytest.mark.parametrize(
    ("text", "uri", "weight"),
    [
        ("a.jsonl", "a.jsonl", None),
        ("a.jsonl=2", "a.jsonl", 2),
        ("org/set:cfg:train=0.5", "org/set:cfg:train", 0.5),
        ("https://x/a.jsonl?n=5", "https://x/a.jsonl?n=5", None),
        ("x=y/a.jsonl", "x=y/a.jsonl", None),
    ],
)
def test_a_number_behind_an_equals_sign_is_a_weight(text, uri, weight):
    assert Source.parse(text) == Source(uri, weight)


@pytest.mark.parametrize(("texts", "message"), [(["a=0"], "weight 0"), (["a=1", "b"], "b has no weight")])
def test_weights_that_make_no_mix_are_refused(texts, message):
    with pytest.raises(EagleError, match=message):
        parse_sources(texts)


@given(st.lists(st.integers(), max_size=60), st.integers(0, 20), st.integers())
def test_shuffling_keeps_every_item_and_moves_none_far_ahead(items, size, seed):
    mixed = list(shuffled(iter(items), size, random.Random(seed)))
    assert sorted(mixed) == sorted(items)
    places = list(shuffled(iter(range(len(items))), size, random.Random(seed)))
    assert all(item <= place + size for place, item in enumerate(places))
    assert size or mixed == items


def test_the_seed_decides_which_rows_come_first(tmp_path):
    rows = source(tmp_path, "rows", [{"prompt": f"{i}"} for i in range(50)])
    orders = [
        [prompt.turns[0] for prompt in read_sources(config(rows, shuffle_buffer=20), seed, Tally())]
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0], key=int) == sorted(orders[2], key=int) == [f"{i}" for i in range(50)]


def test_an_empty_source_is_refused_even_if_others_give_enough(tmp_path):
    full, empty = source(tmp_path, "full", [{"prompt": "a"}] * 3), source(tmp_path, "empty", [])
    with pytest.raises(EagleError, match=r"empty\.jsonl has no rows"):
        list(read_sources(config(full, empty), 0, Tally()))


def test_licences_come_from_the_row_then_from_the_flag(tmp_path):
    rows = source(tmp_path, "rows", [{"prompt": "a", "license": "MIT"}, {"prompt": "b"}])
    given_one = config(rows, source_license=[f"{rows}=CC-BY-4.0"])
    assert [prompt.license for prompt in read_sources(given_one, 0, Tally())] == ["MIT", "CC-BY-4.0"]
    assert [prompt.license for prompt in read_sources(config(rows), 0, Tally())] == ["MIT", ""]
    assert parse_licenses([], [Source("builtin:chat")]) == {"builtin:chat": "Apache-2.0"}


@pytest.mark.parametrize("text", ["MIT", "b=MIT", "a="])
def test_a_licence_that_belongs_to_no_source_is_refused(text):
    with pytest.raises(EagleError, match="--source-license"):
        parse_licenses([text], [Source("a")])


def test_the_system_prompt_is_kept_replaced_or_removed(tmp_path):
    rows = source(
        tmp_path,
        "rows",
        [{"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]}],
    )
    file = tmp_path / "system.txt"
    file.write_text("\ufefffrom a file\n", encoding="utf-8")

    def system(**changes) -> str:
        [prompt] = read_sources(config(rows, **changes), 0, Tally())
        return prompt.system

    assert system() == "own"
    assert system(system_prompt="other") == "other"
    assert system(system_prompt="") == ""
    assert system(system_prompt_file=str(file)) == "from a file"
    with pytest.raises(EagleError, match="both given"):
        system(system_prompt="x", system_prompt_file=str(file))
    with pytest.raises(EagleError, match="does not exist"):
        system(system_prompt_file=str(tmp_path / "missing"))


def test_rows_that_are_no_prompts_are_counted_by_reason(tmp_path):
    rows = source(tmp_path, "rows", [{"prompt": "a"}, {"prompt": " "}, {"x": 1}, {"x": 2}])
    tally = Tally()
    for prompt in read_sources(config(rows), 0, tally):
        tally.count(prompt.source, KEPT)
    assert tally.record() == {rows: {"read": 4, "kept": 1, "no_prompt_field": 2, "no_user_text": 1}}
    assert tally.rejects == 3
    with pytest.raises(
        EagleError, match=r"3 of 4 rows are no prompts, such as: .*line 2 has no text.*--max-reject-rate"
    ):
        tally.check(0.7, finished=True)
    tally.check(0.75, finished=True)


def test_a_source_of_nothing_but_rejects_is_not_read_to_its_end(tmp_path):
    rows = source(tmp_path, "rows", [{"x": 1}] * 3000)
    tally = Tally()
    with pytest.raises(EagleError, match="--prompt-field"):
        list(read_sources(config(rows), 0, tally))
    assert tally.read == 1000


def test_what_was_asked_before_is_left_out_and_counted():
    tally = Tally()
    others = [replace(PROMPT, turns=("a",)), replace(PROMPT, turns=("ab",)), replace(PROMPT, system="")]
    assert list(distinct([PROMPT, replace(PROMPT, id="2"), *others, PROMPT], 1, tally)) == [PROMPT, *others]
    assert tally.total("duplicates") == 2


def test_what_is_nearly_the_same_is_left_out_and_what_is_merely_alike_is_kept():
    text = "Explain to a new colleague how our billing service retries a failed payment, step by step."
    near = [text, text.upper(), f"{text} Thanks!", text.replace("billing", "invoicing")]
    alike = [
        "Explain to a new colleague how our search service ranks results.",
        "What is 17 * 23?",
        "What is 18 * 24?",
    ]
    tally = Tally()
    kept = list(distinct([replace(PROMPT, turns=(turn,)) for turn in (*near, *alike)], 0.7, tally))
    assert [prompt.turns[0] for prompt in kept] == [text, *alike]
    assert tally.total("near_duplicates") == 3


def test_hardly_any_of_the_built_in_prompts_passes_for_another():
    prompts = read_prompts("builtin:chat")
    assert len(list(distinct(prompts, 0.8, Tally()))) > 0.99 * len(prompts)


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
    exclusion = Exclusion.of([source(tmp_path, "benchmark", BENCHMARK)])
    tally = Tally()
    kept = list(allowed([replace(PROMPT, turns=("Hello there", turn))], exclusion, tally))
    assert (not kept) == excluded
    assert tally.total("excluded") == excluded


def test_the_built_in_evaluation_excludes_nothing_of_the_built_in_training_prompts():
    exclusion = Exclusion.of(["builtin:eval"])
    assert not [prompt for prompt in read_prompts("builtin:chat") if exclusion.holds(prompt)]
    assert all(exclusion.holds(prompt) for prompt in read_prompts("builtin:eval"))


def test_ids_that_come_again_are_made_different():
    prompts = [replace(PROMPT, id=name) for name in ("a", "b", "a", "a")]
    assert [prompt.id for prompt in with_own_ids(prompts)] == ["a", "b", "a#2", "a#3"]


@pytest.mark.parametrize(
    "change",
    [{"id": "2"}, {"turns": ("ab",)}, {"source": "t"}, {"category": ""}, {"license": ""}, {"system": ""}],
)
def test_the_digest_sees_every_field_and_the_order(change):
    other = replace(PROMPT, **change)
    digests = [prompts_digest(prompts) for prompts in ([PROMPT, other], [other, PROMPT], [PROMPT], [other])]
    assert len({*digests, prompts_digest([PROMPT, PROMPT])}) == 5
    assert prompts_digest([replace(PROMPT), other]) == digests[0]
