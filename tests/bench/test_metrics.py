"""Claims about the arithmetic, on records made by hand."""

from __future__ import annotations

import pytest

from stages.bench.metrics import metrics, speedup_interval
from tests.bench.outputs import measured, output, request


def two_prompts():
    """One short answer that EAGLE makes 8 times as fast, and one long answer without any gain."""
    quick = request(
        output(range(9), prefill_s=1.0, decode_s=7.0),
        output(
            range(9),
            prefill_s=0.5,
            decode_s=0.5,
            draft_s=0.2,
            steps=2,
            drafted=8,
            accepted_per_depth=(2, 2, 2),
        ),
    )
    slow = request(
        output(range(91), prefill_s=2.0, decode_s=90.0),
        output(
            range(91),
            prefill_s=2.0,
            decode_s=90.0,
            draft_s=30.0,
            steps=80,
            drafted=80,
            accepted_per_depth=(10,),
        ),
    )
    return [measured(quick, prompt_id="quick"), measured(slow, prompt_id="slow", skipped=1)]


def test_speed_is_total_tokens_over_total_time_and_no_mean_of_ratios() -> None:
    found = metrics(two_prompts())
    assert (found.plain.tokens, found.plain.seconds) == (100, 100.0)
    assert (found.eagle.tokens, found.eagle.seconds) == (100, 93.0)
    assert found.plain.tokens_per_s == 1.0
    assert found.eagle.tokens_per_s == pytest.approx(100 / 93)
    assert found.speedup == pytest.approx(100 / 93)  # the mean of the two ratios would be 4.5


def test_each_side_is_credited_with_its_own_tokens() -> None:
    longer = request(output(range(10), decode_s=9.0), output(range(20), decode_s=9.0))
    assert metrics([measured(longer)]).speedup == 2.0


def test_acceptance_is_counted_over_all_verify_steps() -> None:
    found = metrics(two_prompts())
    assert found.eagle.steps == 82
    assert found.accepted_per_step == pytest.approx(16 / 82)
    assert found.tokens_per_step == pytest.approx(98 / 82)
    assert found.accepted_per_depth == pytest.approx([12 / 82, 2 / 82, 2 / 82])
    assert sum(found.accepted_per_depth) == pytest.approx(found.accepted_per_step)
    assert found.eagle.drafted_per_step == pytest.approx(88 / 82)


def test_latencies_are_means_over_requests_in_milliseconds() -> None:
    found = metrics(two_prompts())
    assert found.plain.mean_ttft_ms == pytest.approx(1500)
    assert found.plain.mean_tpot_ms == pytest.approx(1000 * (7 / 8 + 1) / 2)


def test_the_shares_of_eagles_time_add_up_to_one() -> None:
    found = metrics(two_prompts()).eagle
    assert found.draft_share == pytest.approx(30.2 / 93)
    assert found.prefill_share + found.draft_share + found.verify_share == pytest.approx(1)


def test_skipped_turns_count_and_prompts_without_an_answer_do_not() -> None:
    found = metrics([*two_prompts(), measured(skipped=2)])
    assert (found.prompts, found.requests, found.skipped) == (2, 2, 3)


def test_an_answer_of_one_token_has_no_time_per_further_token() -> None:
    found = metrics([measured(request(output([7], decode_s=0.0), output([7], decode_s=0.0)))])
    assert found.plain.mean_tpot_ms is None
    assert (found.accepted_per_step, found.tokens_per_step, found.accepted_per_depth) == (0.0, 0.0, [])


def test_the_interval_spans_what_resampled_prompts_give() -> None:
    # Of two prompts a quarter of the resamples hold only the quick one and a quarter only the slow one.
    low, high = speedup_interval(two_prompts()) or (0.0, 0.0)
    assert (low, high) == pytest.approx((1.0, 8.0))


def test_the_interval_of_equal_prompts_is_a_point() -> None:
    same = [measured(request(output(range(5)), output(range(5), decode_s=0.5))) for _ in range(4)]
    assert speedup_interval(same) == pytest.approx((4 / 3, 4 / 3))


def test_the_interval_narrows_with_more_prompts_and_holds_the_speedup() -> None:
    few, many = two_prompts() * 4, two_prompts() * 40
    (low, high), (narrow_low, narrow_high) = speedup_interval(few), speedup_interval(many)  # type: ignore[misc]
    assert low < narrow_low < metrics(many).speedup < narrow_high < high


def test_a_single_prompt_has_no_interval() -> None:
    assert metrics(two_prompts()[:1]).speedup_ci95 is None
