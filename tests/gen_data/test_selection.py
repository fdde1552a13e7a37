from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import EagleError
from stages.gen_data.selection import (
    Source,
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
        ("https://x/a.jsonl?n=5=2", "https://x/a.jsonl?n=5", 2),
        ("https://x/a.jsonl?m=1&n=5", "https://x/a.jsonl?m=1&n=5", None),
        ("data/part-?.jsonl=1e3", "data/part-?.jsonl", 1000),
        ("C:\\a.jsonl=.5", "C:\\a.jsonl", 0.5),
        ("a.jsonl=2=3", "a.jsonl=2", 3),
        ("a.jsonl=1_000", "a.jsonl=1_000", None),
    ],
)
def test_a_number_behind_an_equals_sign_is_a_weight(text, uri, weight):
    assert Source.parse(text) == Source(uri, weight)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a=0"], "weight 0"),
        (["a=-1"], "weight -1"),
        (["a=nan"], "weight nan"),
        (["a=1e999"], "weight 1e999"),
        (["a=1", "b"], "b has no weight"),
        (["a=1", "a=2"], "a is given with 2 weights"),
    ],
)
def test_weights_that_make_no_mix_are_refused(texts, message):
    with pytest.raises(EagleError, match=message):
        parse_sources(texts)


def test_the_largest_and_smallest_weights_make_a_mix():
    streams = [iter("aaaa"), iter("bbbb"), iter("c")]
    assert len(list(drawn(streams, [1e308, 1e308, 5e-324], random.Random(0)))) == 9


@given(st.lists(st.integers(1, 9), max_size=60), st.integers(0, 20), st.integers(0, 30))
def test_a_shuffle_buffer_holds_no_more_than_it_may(items, size, most):
    held, taken = 0, []

    def counted():
        nonlocal held
        for item in items:
            assert held <= max(most, 9)  # one item is held whatever its size
            held += item
            yield item

    for item in shuffled(counted(), size, random.Random(0), lambda item: item, most):
        held -= item
        taken.append(item)
    assert sorted(taken) == sorted(items)


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
    with pytest.raises(EagleError, match="--prompt-field") as caught:
        list(read_sources(config(rows), 0, tally))
    assert tally.read == 1000
    assert str(caught.value).count("its keys are: x") == 1  # one example of each trouble


def test_what_was_asked_before_is_left_out_and_counted():
    tally = Tally()
    changes = [{"turns": ("a",)}, {"turns": ("ab",)}, {"system": ""}, {"tools": '[{"name": "f"}]'}]
    others = [replace(PROMPT, **change) for change in changes]
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


@pytest.mark.parametrize("setting", ["system", "tools"])
def test_what_stands_before_all_conversations_makes_none_of_them_alike(setting):
    long = "You are the assistant of a large bank and never say what you do not know. " * 50
    questions = ["What is an IBAN?", "Is the bank open on Sundays?", "is the bank open on sundays"]
    prompts = [Prompt(str(i), (text,), "s", **{setting: long}) for i, text in enumerate(questions)]
    assert [prompt.id for prompt in distinct(prompts, 0.7, Tally())] == ["0", "1"]
    assert len(list(distinct([*prompts, Prompt("4", (questions[0],), "s")], 0.7, Tally()))) == 3


@pytest.mark.parametrize("near", [0.0001, 0.01, 0.999])
def test_any_similarity_will_do(near):
    prompts = [
        Prompt(str(i), (text,), "s") for i, text in enumerate(["", "a", "abcdefgh" * 9, "b" * 90, "a"])
    ]
    tally = Tally()
    kept = list(distinct(prompts, near, tally))
    assert kept[0] == prompts[0]
    assert len(kept) + tally.read == 5


def test_hardly_any_of_the_built_in_prompts_passes_for_another():
    prompts = read_prompts("builtin:chat")
    assert len(list(distinct(prompts, 0.8, Tally()))) > 0.99 * len(prompts)


def test_messages_from_inside_conversations_are_no_sign_that_rows_are_misread(tmp_path):
    tree = [
        {
            "message_id": str(i),
            "parent_id": str(i - 1) if i % 9 else None,
            "text": f"{i}?",
            "role": "prompter",
        }
        for i in range(90)
    ]
    rows, tally = source(tmp_path, "tree", tree), Tally()
    assert len(list(read_sources(config(rows), 0, tally))) == 10
    tally.check(0, finished=True)
    assert tally.record()[rows]["inside_conversation"] == 80


def test_rows_that_were_read_and_not_needed_are_counted_as_such(tmp_path):
    rows, tally = source(tmp_path, "rows", [{"prompt": f"{i}"} for i in range(9)]), Tally()
    read_ahead = list(islice(read_sources(config(rows), 0, tally), 7))
    tally.count(rows, "excluded")
    tally.close(Counter(prompt.source for prompt in read_ahead[:4]))
    assert tally.record()[rows] == {"read": 3, "excluded": 1, "not_needed": 2}
    assert tally.summary() == "1 excluded"


IDS = st.lists(st.text("a#@~12", min_size=1, max_size=6), max_size=12)


@given(IDS, st.integers(1, 3), st.integers(1, 3))
def test_no_two_rows_have_the_same_id_whatever_ids_the_sources_have(ids, answers, rows):
    prompts = list(with_own_ids(replace(PROMPT, id=name) for name in ids))
    names = [
        f"{prompt.id}{f'@{answer}' if answer > 1 else ''}{f'#{row}' if row > 1 else ''}"
        for prompt in prompts
        for answer in range(1, answers + 1)
        for row in range(1, rows + 1)
    ]
    assert len(set(names)) == len(names)


def test_ids_that_come_again_are_made_different_and_others_stay():
    prompts = [replace(PROMPT, id=name) for name in ("a", "b", "a", "a", "a~2", "c#x")]
    assert [prompt.id for prompt in with_own_ids(prompts)] == ["a", "b", "a~2", "a~3", "a~2~1", "c#x"]


@pytest.mark.parametrize(
    "change",
    [{"id": "2"}, {"turns": ("ab",)}, {"source": "t"}, {"category": ""}, {"license": ""}, {"system": ""}],
)
def test_the_digest_sees_every_field_and_the_order(change):
    other = replace(PROMPT, **change)
    digests = [prompts_digest(prompts) for prompts in ([PROMPT, other], [other, PROMPT], [PROMPT], [other])]
    assert len({*digests, prompts_digest([PROMPT, PROMPT])}) == 5
    assert prompts_digest([replace(PROMPT), other]) == digests[0]
