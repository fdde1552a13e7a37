from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.serve.answer import Answer
from stages.targets import Target

END = 511


def written(target: Target, groups: list[list[int]], max_tokens: int, stops: list[str]) -> tuple[str, Answer]:
    answer = Answer(target.tokenizer, end_ids={END}, max_tokens=max_tokens, stops=stops)
    return "".join(answer.push(group) for group in groups) + answer.close(), answer


@given(
    groups=st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=6), max_size=12),
    max_tokens=st.integers(1, 40),
    stops=st.lists(st.sampled_from(["e", "ea", "\ufffd", "a t"]), max_size=2),
)
def test_grouping_of_tokens_changes_nothing(
    target: Target, groups: list[list[int]], max_tokens: int, stops: list[str]
) -> None:
    text, answer = written(target, groups, max_tokens, stops)
    one_by_one = [[token_id] for group in groups for token_id in group]
    same_text, same = written(target, one_by_one, max_tokens, stops)
    assert (text, answer.tokens, answer.finish_reason) == (same_text, same.tokens, same.finish_reason)


def test_the_token_that_ends_the_answer_is_counted_and_has_no_text(target: Target) -> None:
    ids = target.tokenizer.encode("eat")
    text, answer = written(target, [[*ids, END, *ids]], 100, [])
    assert (text, answer.tokens, answer.finish_reason) == ("eat", len(ids) + 1, "stop")


def test_the_token_that_completes_a_stop_string_is_the_last_that_counts(target: Target) -> None:
    ids = [target.tokenizer.encode(letter)[0] for letter in "xyzw"]
    text, answer = written(target, [ids], 100, ["yz"])
    assert (text, answer.tokens, answer.finish_reason) == ("x", 3, "stop")
    assert (answer.token_ids, answer.stop_reason) == (ids[:3], "yz")


def test_an_answer_cut_by_its_limit_keeps_its_unfinished_character_and_held_text(target: Target) -> None:
    ids = target.tokenizer.encode("x日")
    text, answer = written(target, [ids], len(ids) - 1, ["x\ufffdz"])
    assert (text, answer.tokens, answer.finish_reason) == ("x\ufffd", len(ids) - 1, "length")


def test_what_ends_the_answer_is_shown_where_it_is_asked_for(target: Target) -> None:
    ids = [target.tokenizer.encode(letter)[0] for letter in "xyzw"]
    asked: list[tuple[set[int], list[str], str, int | str | None]] = [
        (set(), ["yz"], "xyz", "yz"),
        ({END, ids[2]}, [], "xyz", ids[2]),
        ({END, ids[2]}, ["yz"], "xyz", "yz"),
        ({END}, [], "xyzw", None),
    ]
    for end_ids, stops, shown, reason in asked:
        answer = Answer(
            target.tokenizer, end_ids=end_ids, max_tokens=9, stops=stops, with_stop=True, eos_ids={END}
        )
        assert answer.push([*ids, END]) + answer.close() == shown
        assert (answer.finish_reason, answer.stop_reason) == ("stop", reason)
