from __future__ import annotations

from dataclasses import replace

import pytest

from stages.errors import EagleError
from stages.gen_data.selection import Tally, distinct, prompts_digest, take_turns
from stages.prompts import Prompt
from tests.tiny import write_jsonl

PROMPT = Prompt("1", ("a", "b"), "s", category="c", license="l", system="y")


def test_sources_take_turns_until_all_are_used_up(tmp_path):
    long = str(write_jsonl(tmp_path / "long.jsonl", [{"prompt": f"long {i}"} for i in range(4)]))
    short = str(write_jsonl(tmp_path / "short.jsonl", [{"prompt": "short 0"}]))
    tally = Tally()
    order = [prompt.turns[0] for prompt in take_turns([long, short, long], tally)]
    assert order == ["long 0", "short 0", "long 1", "long 2", "long 3"]
    assert tally.read == 5


def test_an_empty_source_is_refused_even_if_others_give_enough(tmp_path):
    full = str(write_jsonl(tmp_path / "full.jsonl", [{"prompt": "a"}] * 3))
    empty = str(write_jsonl(tmp_path / "empty.jsonl", []))
    with pytest.raises(EagleError, match=r"empty\.jsonl has no rows"):
        list(take_turns([full, empty], Tally()))


def test_what_was_asked_before_is_left_out_and_counted():
    tally = Tally()
    others = [replace(PROMPT, turns=("a",)), replace(PROMPT, turns=("ab",)), replace(PROMPT, system="")]
    assert list(distinct([PROMPT, replace(PROMPT, id="2"), *others, PROMPT], tally)) == [PROMPT, *others]
    assert tally.duplicates == 2


@pytest.mark.parametrize(
    "change",
    [{"id": "2"}, {"turns": ("ab",)}, {"source": "t"}, {"category": ""}, {"license": ""}, {"system": ""}],
)
def test_the_digest_sees_every_field_and_the_order(change):
    other = replace(PROMPT, **change)
    digests = [prompts_digest(prompts) for prompts in ([PROMPT, other], [other, PROMPT], [PROMPT], [other])]
    assert len({*digests, prompts_digest([PROMPT, PROMPT])}) == 5
    assert prompts_digest([replace(PROMPT), other]) == digests[0]
