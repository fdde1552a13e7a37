"""Claims about differences: what is a near-tie, what is a fault, and that float32 decides it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.bench.lossless import (
    Difference,
    Divergence,
    differences,
    differing_position,
    explain,
    float32_scores,
    token_gap,
    verdict,
)
from stages.bench.result import sameness
from stages.decoding import EagleModel, SamplingParams
from stages.targets import Target
from tests.bench.outputs import measured, output, request

PROMPT = [5, 17, 60, 201, 9]
GREEDY = SamplingParams(max_new_tokens=12)


@pytest.mark.parametrize(
    ("plain", "eagle", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1], [1, 2], 1),
    ],
)
def test_answers_differ_at_the_first_token_that_is_not_the_same(
    plain: list[int], eagle: list[int], position: int | None
) -> None:
    assert differing_position(plain, eagle) == position


@pytest.mark.parametrize(
    ("a", "b", "gap", "top_two"),
    [(1, 3, 0.5, True), (3, 1, 0.5, True), (1, 2, 1.0, False), (3, 2, 1.0, False), (0, 2, 9.0, False)],
)
def test_a_gap_is_measured_from_the_best_token(a: int, b: int, gap: float, top_two: bool) -> None:
    scores = torch.tensor([1.0, 10.0, 9.0, 9.5])
    assert token_gap(scores, a, b) == (gap, top_two)


@given(
    st.lists(st.floats(-50, 50, width=16), min_size=3, max_size=20),
    st.lists(st.floats(-0.124, 0.124), min_size=40, max_size=40),
)
def test_rounding_errors_below_half_the_bound_never_look_like_a_fault(
    scores: list[float], errors: list[float]
) -> None:
    true = torch.tensor(scores)
    noisy = [true + torch.tensor(errors[i : i + len(scores)]) for i in (0, 20)]
    gap, _ = token_gap(true, *(int(each.argmax()) for each in noisy))
    assert gap < 0.25


def parted(target: Target, at: int, eagle_token: int, dtype: str = "bfloat16") -> Difference:
    """Plain greedy decoding of PROMPT, and an answer that leaves it after `at` tokens."""
    ids = EagleModel(target).generate(PROMPT, GREEDY).token_ids
    other = [*ids[:at], eagle_token]
    found = differences([measured(request(output(ids), output(other), prompt_ids=PROMPT))], dtype)
    assert [each.position for each in found] == [at]
    return found[0]


def runner_up(target: Target, at: int) -> tuple[int, float]:
    """The second-best token after `at` tokens of plain decoding, and how far behind it is (transformers)."""
    ids = EagleModel(target).generate(PROMPT, GREEDY).token_ids
    with torch.no_grad():
        best = target.model(torch.tensor([PROMPT + ids[:at]])).logits[0, -1].topk(2)
    assert int(best.indices[0]) == ids[at]
    return int(best.indices[1]), float(best.values[0] - best.values[1])


def test_a_difference_is_a_near_tie_just_above_its_gap_and_a_fault_just_below(target: Target) -> None:
    second, gap = runner_up(target, 3)
    difference = parted(target, 3, second)
    near = explain(target, difference, GREEDY, bound=gap * 1.01)
    assert (near.cause, near.fault, near.top_two) == ("near_tie", False, True)
    assert near.gap == pytest.approx(gap, abs=1e-4)
    assert (near.position, near.eagle_token) == (3, second)
    wide = explain(target, difference, GREEDY, bound=gap * 0.99)
    assert (wide.cause, wide.fault) == ("wide_gap", True)


def test_any_difference_in_float32_is_a_fault(target: Target) -> None:
    second, _ = runner_up(target, 3)
    found = explain(target, parted(target, 3, second, dtype="float32"), GREEDY, bound=1e9)
    assert (found.cause, found.fault) == ("float32", True)


def test_an_answer_that_only_goes_on_is_a_fault(target: Target) -> None:
    pair = request(output([1, 2, 3]), output([1, 2]))
    found = explain(target, Difference("eval", "p", pair, 2, "bfloat16"), GREEDY, bound=1e9)
    assert (found.cause, found.fault, found.gap) == ("length", True, None)
    assert (found.plain_token, found.eagle_token) == (3, None)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.5])
def test_the_scores_are_those_by_which_plain_decoding_chooses(target: Target, temperature: float) -> None:
    params = replace(GREEDY, temperature=temperature, seed=7)
    ids = EagleModel(target).generate(PROMPT, params).token_ids
    chosen = [int(float32_scores(target, PROMPT + ids[:at], params).argmax()) for at in range(len(ids))]
    assert chosen == ids


def test_the_gap_of_a_sampled_token_is_in_logits_at_every_temperature(target: Target) -> None:
    """As the temperature falls to 0 the score becomes the logit, so one bound serves all temperatures."""
    greedy = float32_scores(target, PROMPT, GREEDY)
    cold = float32_scores(target, PROMPT, replace(GREEDY, temperature=1e-4))
    torch.testing.assert_close(cold, greedy, rtol=0, atol=25e-4)


def divergence(cause: str, dtype: str = "bfloat16") -> Divergence:
    return Divergence(
        set="eval",
        prompt_id="p",
        turn=0,
        dtype=dtype,
        position=0,
        plain_token=1,
        eagle_token=2,
        gap=0.1,
        top_two=True,
        cause=cause,  # type: ignore[arg-type]
    )


SAME, OTHER = request(output([1, 2]), output([1, 2])), request(output([1, 2]), output([2, 2]))


def test_every_pair_is_identical_a_near_tie_or_a_fault() -> None:
    records = [measured(SAME, OTHER), measured(OTHER), measured(SAME), measured(skipped=1)]
    found = verdict(
        records, records[2:3], [divergence("near_tie"), divergence("wide_gap")], 0.25, dtype="bfloat16"
    )
    assert (found.requests, found.identical, found.near_ties, found.faults) == (4, 2, 1, 1)
    assert (found.float32.prompts, found.float32.identical) == (1, 1)


def test_a_difference_of_the_float32_check_is_a_fault_of_the_report() -> None:
    found = verdict(
        [measured(SAME)], [measured(SAME, OTHER)], [divergence("float32", "float32")], 0.25, dtype="bfloat16"
    )
    assert (found.identical, found.faults) == (1, 1)
    assert (found.float32.prompts, found.float32.identical) == (1, 0)


def test_a_run_in_float32_is_its_own_check() -> None:
    records = [measured(SAME), measured(SAME, OTHER), measured(skipped=1)]
    found = verdict(records, [], [divergence("float32", "float32")], 0.25, dtype="float32")
    assert (found.float32.prompts, found.float32.identical) == (2, 1)


def test_near_ties_are_counted_and_explained_in_words() -> None:
    records = [measured(SAME, OTHER), measured(SAME)]
    found = verdict(records, records[1:], [divergence("near_tie")], 0.25, dtype="bfloat16")
    same, near, checked = sameness(found, "bfloat16")
    assert same == "Same text: 2 of 3 answers are the same, token for token."
    assert near.startswith("1 parts from plain decoding at a near-tie, where bfloat16 rounds either way")
    assert "within 0.100 logits of the best (bound 0.25)" in near
    assert checked == "Checked exactly in float32: 1 of 1 prompts have identical answers."
