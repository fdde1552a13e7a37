"""Speed and acceptance of measured prompts. Sums and counts first, one division last: never a mean of ratios.

Requests run one at a time, so tokens per second is all output tokens over all prefill and decode time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from pydantic import Field

from stages.bench.record import Measured, Output, Record

RESAMPLES = 10_000
PERCENTILES = (2.5, 97.5)


class Lengths(Record):
    """How long texts were, in tokens."""

    total: int
    mean: float
    median: float
    p90: float
    longest: int

    @classmethod
    def of(cls, counts: Sequence[int]) -> Lengths:
        """Of at least one text."""
        return cls(
            total=sum(counts),
            mean=sum(counts) / len(counts),
            median=float(np.median(counts)),
            p90=float(np.percentile(counts, 90)),
            longest=max(counts),
        )


class Speed(Record):
    """How fast one side answered."""

    tokens: int = Field(description="Output tokens.")
    seconds: float = Field(description="Time for them, prefill and decode.")
    tokens_per_s: float = Field(description="tokens / seconds.")
    mean_ttft_ms: float = Field(description="Mean time to the first token, in milliseconds.")
    mean_tpot_ms: float | None = Field(
        description="Mean over requests of the time per output token after the first, in milliseconds, as "
        "vllm bench serve has it; null when no answer has two tokens."
    )


class EagleSpeed(Speed):
    """The same for EAGLE, and where its time went: three shares of `seconds`, 1 in all."""

    steps: int = Field(description="Verify steps.")
    drafted_per_step: float = Field(description="Drafted tokens a step.")
    prefill_share: float
    draft_share: float
    verify_share: float


class Metrics(Record):
    """One prompt set, or all of them pooled."""

    prompts: int = Field(description="Prompts with at least one answer.")
    requests: int = Field(description="Answers; a prompt of several turns has several.")
    skipped: int = Field(description="Turns left out because they do not fit the target's context.")
    prompt_lengths: Lengths | None = Field(default=None, description="Of the prompts, history included.")
    output_lengths: Lengths | None = Field(default=None, description="Of plain decoding's answers.")
    plain: Speed
    eagle: EagleSpeed
    speedup: float = Field(description="eagle.tokens_per_s / plain.tokens_per_s.")
    speedup_ci95: tuple[float, float] | None = Field(
        description="95 % bootstrap interval of speedup over prompts; null for a single prompt."
    )
    accepted_per_step: float = Field(description="Accepted drafts a verify step.")
    tokens_per_step: float = Field(description="Tokens a verify step, with the target's own.")
    accepted_per_depth: list[float] = Field(
        description="Share of the verify steps that accepted a draft at level 1, 2, ...; the sum is "
        "accepted_per_step."
    )


def metrics(measured: Sequence[Measured]) -> Metrics:
    """Of at least one request."""
    answered = [record for record in measured if record.requests]
    plain = [request.plain for record in answered for request in record.requests]
    eagle = [request.eagle for record in answered for request in record.requests]
    steps = sum(output.steps for output in eagle)
    levels = zip_longest(*(output.accepted_per_depth for output in eagle), fillvalue=0)
    slow, fast = _speed(plain), _eagle_speed(eagle)
    return Metrics(
        prompts=len(answered),
        requests=len(eagle),
        skipped=sum(record.skipped for record in measured),
        prompt_lengths=Lengths.of([len(r.prompt_ids) for record in answered for r in record.requests]),
        output_lengths=Lengths.of([output.tokens for output in plain]),
        plain=slow,
        eagle=fast,
        speedup=speedup(answered),
        speedup_ci95=speedup_interval(answered),
        accepted_per_step=_ratio(sum(output.accepted for output in eagle), steps),
        tokens_per_step=_ratio(sum(output.step_tokens for output in eagle), steps),
        accepted_per_depth=[_ratio(sum(level), steps) for level in levels],
    )


def speedup(measured: Sequence[Measured]) -> float:
    """EAGLE's tokens per second over those of plain decoding, of at least one request."""
    (plain_tokens, plain_s), (eagle_tokens, eagle_s) = _totals(measured)
    return (eagle_tokens / eagle_s) / (plain_tokens / plain_s)


def speedup_interval(measured: Sequence[Measured], seed: int = 0) -> tuple[float, float] | None:
    """95 % percentile bootstrap of the speed-up: prompts drawn with replacement, totals over totals.

    The turns of a prompt stay together, since they are not independent. None for fewer than two prompts.
    """
    return ratio_interval([_totals([record]) for record in measured], seed)


def ratio_interval(
    units: Sequence[Sequence[Sequence[float]]], seed: int = 0, fewest: int = 2
) -> tuple[float, float] | None:
    """95 % percentile bootstrap of (tokens / seconds) of the second side over that of the first.

    Args:
        units: [units, side, (tokens, seconds)]; drawn with replacement, totals over totals.
        fewest: None for fewer units than these.
    """
    if len(units) < fewest:
        return None
    totals = np.array(units)
    generator = np.random.default_rng(seed)
    # A resample is how often each unit was drawn; a thousand at a time keep memory small.
    ratios: list[float] = []
    for start in range(0, RESAMPLES, 1000):
        size = min(1000, RESAMPLES - start)
        counts = generator.multinomial(len(units), [1 / len(units)] * len(units), size=size)
        sums = np.tensordot(counts, totals, axes=1)  # [resamples, side, (tokens, seconds)]
        rates = sums[..., 0] / sums[..., 1]
        ratios.extend((rates[:, 1] / rates[:, 0]).tolist())
    low, high = np.percentile(ratios, PERCENTILES)
    return float(low), float(high)


def _totals(measured: Sequence[Measured]) -> list[list[float]]:
    """Tokens and seconds, of plain decoding and of EAGLE."""
    requests = [request for record in measured for request in record.requests]
    sides = ([request.plain for request in requests], [request.eagle for request in requests])
    return [[sum(output.tokens for output in side), sum(output.seconds for output in side)] for side in sides]


def _speed(outputs: Sequence[Output]) -> Speed:
    tokens = sum(output.tokens for output in outputs)
    seconds = sum(output.seconds for output in outputs)
    tpots = [output.decode_s / (output.tokens - 1) for output in outputs if output.tokens > 1]
    return Speed(
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        mean_ttft_ms=1000 * sum(output.prefill_s for output in outputs) / len(outputs),
        mean_tpot_ms=1000 * sum(tpots) / len(tpots) if tpots else None,
    )


def _eagle_speed(outputs: Sequence[Output]) -> EagleSpeed:
    speed = _speed(outputs)
    steps = sum(output.steps for output in outputs)
    return EagleSpeed(
        **speed.model_dump(),
        steps=steps,
        drafted_per_step=_ratio(sum(output.drafted for output in outputs), steps),
        prefill_share=sum(output.prefill_s for output in outputs) / speed.seconds,
        draft_share=sum(output.draft_s for output in outputs) / speed.seconds,
        verify_share=sum(output.verify_s for output in outputs) / speed.seconds,
    )


def _ratio(count: float, steps: int) -> float:
    """0 where no step was taken: every answer ended with its first token."""
    return count / steps if steps else 0.0
