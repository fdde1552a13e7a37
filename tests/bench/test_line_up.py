"""Claims about who takes part."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import ValidationError

from stages.bench.config import BenchConfig
from stages.bench.line_up import enter, parse_drafters
from stages.decoding.drafters import DrafterKind
from stages.errors import EagleError


def test_drafters_are_parted_by_commas_and_their_settings_are_not() -> None:
    text = "none, ngram:min=1,max=3,draft:some/model,eagle3"
    assert [str(each) for each in parse_drafters(text).choices] == [
        "none",
        "ngram:min=1,max=3",
        "draft:some/model",
        "eagle3",
    ]


def test_every_head_takes_part_under_a_name_of_its_own_before_the_others() -> None:
    entries = enter(parse_drafters("ngram,draft:a/b,eagle3").choices, ["eagle3", "eagle3"])
    assert [(entry.name, entry.head) for entry in entries] == [
        ("eagle3", 0),
        ("eagle3-2", 1),
        ("ngram", None),
        ("draft:b", None),
    ]
    assert [entry.name for entry in enter([], ["medusa", "eagle3"])] == ["medusa", "eagle3"]


def config(**fields: object) -> BenchConfig:
    return BenchConfig(**({"target": "t", "head": ["h"], "prompts": ["p"], "output": "o"} | fields))


def test_a_sweep_is_made_where_more_than_one_drafter_or_one_request_is_asked_for() -> None:
    assert config().levels == ()
    assert config(concurrency="8,1,4").levels == (1, 4, 8)
    assert config(head=["h", "i"]).levels == (1,)
    assert config(drafters="ngram,eagle3").levels == (1,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"concurrency": "1,x"}, "give numbers from 1 on, separated by commas"),
        ({"concurrency": "0"}, "give numbers from 1 on, separated by commas"),
        ({"max_new_tokens": "8,0"}, "give numbers from 1 on, separated by commas"),
        ({"max_new_tokens": ""}, "give numbers from 1 on, separated by commas"),
        ({"max_new_tokens": 2**40}, "is too large"),
        ({"timeout": 0}, "greater than 0"),
        ({"target": "", "head": [], "endpoint": ["a=http://x"], "prompt_lengths": "9"}, "needs a --target"),
        ({"endpoint": ["http://host"]}, "give NAME=URL"),
        ({"endpoint": ["a=http://x", "a=http://y"]}, "a name of its own"),
        ({"head": [], "endpoint": ["a=http://x"]}, "--head is missing"),
        ({"parity": True, "prompts": [], "head": ["h", "i"]}, "--parity takes one --head"),
        ({"target": "", "head": [], "endpoint": ["a=http://x"], "fail_below": 1.0}, "--fail-below needs"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**fields)


def test_a_drafter_that_there_is_not_is_told_with_all_that_there_are() -> None:
    with pytest.raises(EagleError, match="there is no 'eagle4'; name some of") as raised:
        parse_drafters("none,eagle4")
    for kind in (*get_args(DrafterKind), "transformers", "transformers:prompt-lookup"):
        assert kind in str(raised.value)


def test_a_server_needs_no_target_and_a_comparison_nothing_else() -> None:
    assert config(target="", head=[], endpoint=["a=http://x"]).levels == (1,)
    assert BenchConfig(compare=("a", "b")).compare == ("a", "b")
