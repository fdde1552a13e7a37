"""What a sweep came to: one record for each contestant at each concurrency, total over total.

Fields have the names that `vllm bench serve` gives them, and mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from pydantic import Field

from stages.bench.contestant import PLAIN
from stages.bench.load import Load
from stages.bench.metrics import Lengths, ratio_interval
from stages.bench.record import Record, Sample, Turn
from stages.bench.workload import Job

STATISTICS = ("mean", "median", "p90", "p99")
LATENCIES = ("ttft", "tpot", "itl", "e2el")
FEWEST_ROUNDS = 4
"""Of which an interval is made: the quantiles of fewer are hardly more than the lowest and the highest."""


class Level(Record):
    """One contestant at one concurrency or rate, and one temperature. Latencies in milliseconds, over
    requests; those of ITL over the gaps between arrivals, each of one or more tokens. TPOT leaves the first
    token out."""

    contestant: str = Field(description="plain, a drafter, or the name of an endpoint.")
    endpoint: bool = Field(description="Whether it is a server; else an engine in the measuring process.")
    concurrency: int = Field(
        description="Requests under way at all times, while there are more; with a request_rate, those that "
        "an engine in the measuring process answers together."
    )
    request_rate: float | None = Field(
        default=None,
        description="Requests a second that came, answered or not. Null: the next came when one was "
        "answered.",
    )
    temperature: float = Field(default=0.0, description="Of all answers.")
    completed: int = Field(description="Answers.")
    duration: float = Field(description="Seconds, all its turns together.")
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float = Field(description="Answers a second.")
    output_throughput: float = Field(description="Output tokens a second.")
    total_token_throughput: float = Field(description="Prompt and output tokens a second.")
    mean_ttft_ms: float = Field(description="Time to the first token.")
    median_ttft_ms: float
    p90_ttft_ms: float
    p99_ttft_ms: float
    mean_tpot_ms: float | None = Field(
        description="Time per output token after the first; null where no answer has two."
    )
    median_tpot_ms: float | None
    p90_tpot_ms: float | None
    p99_tpot_ms: float | None
    mean_itl_ms: float | None = Field(description="Time from one arrival of tokens to the next.")
    median_itl_ms: float | None
    p90_itl_ms: float | None
    p99_itl_ms: float | None
    mean_e2el_ms: float = Field(description="Time to the last token.")
    median_e2el_ms: float
    p90_e2el_ms: float
    p99_e2el_ms: float
    speedup: float | None = Field(
        description="output_throughput over that of the baseline at the same concurrency; null with a "
        "request_rate, which decides the throughput."
    )
    speedup_ci95: tuple[float, float] | None = Field(
        default=None,
        description="95 % bootstrap interval of speedup over the rounds, in each of which everyone answered "
        f"the same requests; null for fewer than {FEWEST_ROUNDS}, as --repeat makes more.",
    )
    speedup_by_set: dict[str, float] = Field(
        description="By prompt set: tokens per second of waiting (total output tokens over the sum of "
        "end-to-end times) over that of the baseline."
    )
    speedup_by_set_ci95: dict[str, tuple[float, float]] = Field(
        default_factory=dict,
        description="95 % bootstrap intervals of speedup_by_set, over the requests of each set.",
    )
    prompt_lengths: Lengths | None = Field(default=None, description="Of the prompts, as the engine counts.")
    output_lengths: Lengths | None = Field(default=None, description="Of the answers.")
    steps: int | None = Field(description="Verify steps of all answers; null where a server does not tell.")
    drafted_per_step: float | None = Field(description="Drafted tokens a step; null where not told.")
    accepted_per_step: float | None = Field(description="Those of them that entered the answer.")
    tokens_per_step: float | None = Field(description="With the target's own token; 1 for plain decoding.")
    accepted_per_depth: list[float] = Field(
        description="Share of the steps that accepted a draft at level 1, 2, ...; empty where not told."
    )
    prefill_s: float | None = Field(description="Of duration: reading prompts. Null for an endpoint.")
    draft_s: float | None = Field(description="Of duration: drafting, and feeding the drafter.")
    verify_s: float | None = Field(description="Of duration: the target's forwards and choosing tokens.")
    other_s: float | None = Field(description="The rest of duration.")
    peak_memory: int | None = Field(
        default=None,
        description="Bytes resident at most, until the end of this level: of the measuring process, in which "
        "all engines but servers live together, or of the processes of a server that bench launched, each at "
        "its own peak. Null for other endpoints.",
    )
    peak_gpu_memory: int | None = Field(
        default=None,
        description="Bytes that torch had allocated on the GPU at most in the measuring process; null for "
        "servers and without one.",
    )
    compared: int = Field(description="Answers that were compared with plain decoding's, one at a time.")
    identical: int = Field(description="Those with the same token ids; of an endpoint, with the same text.")

    @property
    def load(self) -> Load:
        return Load(self.concurrency, self.request_rate, self.temperature)


class Sweep(Record):
    """All levels of a run."""

    requests: int = Field(description="Requests that each contestant answers at each concurrency.")
    repeat: int = Field(description="How often each of them.")
    baseline: str = Field(description="The contestant whose speed is 1.")
    levels: list[Level]

    @property
    def contestants(self) -> list[str]:
        """In the order they were named."""
        return list(dict.fromkeys(level.contestant for level in self.levels))

    @property
    def loads(self) -> list[Load]:
        """In the order they were measured."""
        return list(dict.fromkeys(level.load for level in self.levels))

    def of(self, contestant: str) -> list[Level]:
        return [level for level in self.levels if level.contestant == contestant]

    def at(self, load: Load) -> list[Level]:
        return [level for level in self.levels if level.load == load]


def make_sweep(
    turns: Sequence[Turn], jobs: Sequence[Job], names: Sequence[str], endpoints: Sequence[str], repeat: int
) -> Sweep:
    """Adds up the turns; the baseline is plain decoding, or else the first contestant."""
    baseline = PLAIN if PLAIN in names else names[0]
    levels = []
    for load in dict.fromkeys(Load(turn.concurrency, turn.rate, turn.temperature) for turn in turns):
        there = [turn for turn in turns if Load(turn.concurrency, turn.rate, turn.temperature) == load]
        own = {name: [turn for turn in there if turn.contestant == name] for name in names}
        for name in names:
            levels.append(_level(name, load, own[name], own[baseline], jobs, name in endpoints))
    return Sweep(requests=len(jobs), repeat=repeat, baseline=baseline, levels=levels)


def _level(
    name: str, load: Load, turns: Sequence[Turn], base: Sequence[Turn], jobs: Sequence[Job], endpoint: bool
) -> Level:
    samples = _samples(turns)
    duration = sum(turn.duration_s for turn in turns)
    output, read = sum(s.output_tokens for s in samples), sum(s.prompt_tokens for s in samples)
    steps = sum(s.steps for s in samples)
    timed = all(turn.verify_s is not None for turn in turns)
    told = timed or steps > 0
    depths = zip_longest(*(s.accepted_per_depth for s in samples), fillvalue=0)
    parts = {key: _sum(turns, key) for key in ("prefill_s", "draft_s", "verify_s")} if timed else {}
    compared = [s for s in samples if comparable(s, jobs[s.request])]
    accepted, drafted = sum(s.accepted for s in samples), sum(s.drafted for s in samples)
    by_set = _by_set(samples, _samples(base), jobs)
    return Level(
        contestant=name,
        endpoint=endpoint,
        concurrency=load.concurrency,
        request_rate=load.rate,
        temperature=load.temperature,
        completed=len(samples),
        duration=duration,
        total_input_tokens=read,
        total_output_tokens=output,
        request_throughput=len(samples) / duration,
        output_throughput=output / duration,
        total_token_throughput=(read + output) / duration,
        **latencies(samples),  # type: ignore[arg-type]
        speedup=(output / duration) / _throughput(base) if load.rate is None else None,
        speedup_ci95=None if load.rate is not None or base is turns else _interval(base, turns),
        speedup_by_set={key: _quotient(units) for key, units in by_set.items()},
        speedup_by_set_ci95={
            key: found
            for key, units in by_set.items()
            if base is not turns and (found := ratio_interval(units)) is not None
        },
        prompt_lengths=Lengths.of([s.prompt_tokens for s in samples]),
        output_lengths=Lengths.of([s.output_tokens for s in samples]),
        steps=steps if told else None,
        drafted_per_step=_ratio(drafted, steps) if told and drafted >= accepted else None,
        accepted_per_step=_ratio(accepted, steps) if told else None,
        tokens_per_step=_ratio(output - len(samples), steps) if told else None,
        accepted_per_depth=[_ratio(sum(depth), steps) for depth in depths],
        prefill_s=parts.get("prefill_s"),
        draft_s=parts.get("draft_s"),
        verify_s=parts.get("verify_s"),
        other_s=max(0.0, duration - sum(parts.values())) if timed else None,
        peak_memory=_most([turn.peak_memory for turn in turns]),
        peak_gpu_memory=_most([turn.peak_gpu_memory for turn in turns]),
        compared=len(compared),
        identical=sum(same_as_plain(s, jobs[s.request]) for s in compared),
    )


def comparable(sample: Sample, job: Job) -> bool:
    """Whether an answer ought to be plain decoding's: others than our engines draw by other noise."""
    return job.plain is not None and (job.temperature == 0 or sample.ours or bool(sample.token_ids))


def same_as_plain(sample: Sample, job: Job) -> bool:
    """Whether an answer is plain decoding's: by ids where there are any, else by text."""
    if job.plain is None:
        return False
    if sample.token_ids:
        return sample.token_ids == job.plain.plain.token_ids
    return sample.text == job.plain_text


def latencies(samples: Sequence[Sample]) -> dict[str, float | None]:
    """`mean_ttft_ms` and so on, for each of LATENCIES and STATISTICS."""
    seconds = {
        "ttft": [s.ttft_s for s in samples],
        "tpot": [(s.e2el_s - s.ttft_s) / (s.output_tokens - 1) for s in samples if s.output_tokens > 1],
        "itl": [gap for s in samples for gap in s.itl_s],
        "e2el": [s.e2el_s for s in samples],
    }
    return {
        f"{statistic}_{name}_ms": _statistic(statistic, values) if values else None
        for name, values in seconds.items()
        for statistic in STATISTICS
    }


def _statistic(name: str, seconds: Sequence[float]) -> float:
    milliseconds = 1000 * np.array(seconds)
    if name == "mean":
        return float(milliseconds.mean())
    return float(np.percentile(milliseconds, {"median": 50, "p90": 90, "p99": 99}[name]))


def _samples(turns: Sequence[Turn]) -> list[Sample]:
    return [sample for turn in turns for sample in turn.samples]


def _interval(base: Sequence[Turn], turns: Sequence[Turn]) -> tuple[float, float] | None:
    """Over the rounds, in each of which both sides had a turn; None where they had not."""
    if len(base) != len(turns):
        return None
    units = [
        [[sum(s.output_tokens for s in turn.samples), turn.duration_s] for turn in pair]
        for pair in zip(base, turns, strict=True)
    ]
    return ratio_interval(units, fewest=FEWEST_ROUNDS)


def _throughput(turns: Sequence[Turn]) -> float:
    return sum(s.output_tokens for s in _samples(turns)) / sum(turn.duration_s for turn in turns)


def _by_set(
    samples: Sequence[Sample], base: Sequence[Sample], jobs: Sequence[Job]
) -> dict[str, list[list[list[float]]]]:
    """Of each set its requests: [requests, (base, own), (output tokens, seconds of waiting)]."""
    sums: dict[int, list[list[float]]] = {}
    for side, given in enumerate((base, samples)):
        for sample in given:
            total = sums.setdefault(sample.request, [[0.0, 0.0], [0.0, 0.0]])[side]
            total[0] += sample.output_tokens
            total[1] += sample.e2el_s
    found: dict[str, list[list[list[float]]]] = {}
    for request in sorted(sums):
        found.setdefault(jobs[request].set, []).append(sums[request])
    # A server may answer a set with nothing, over which nothing is fast.
    return {name: units for name, units in found.items() if sum(base[0] for base, _ in units) > 0}


def _quotient(units: Sequence[Sequence[Sequence[float]]]) -> float:
    """(tokens / seconds) of the second side over that of the first."""
    totals = np.array(units).sum(axis=0)  # [side, (tokens, seconds)]
    rates = totals[:, 0] / totals[:, 1]
    return float(rates[1] / rates[0])


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _sum(turns: Sequence[Turn], name: str) -> float:
    return float(sum(getattr(turn, name) for turn in turns))


def _ratio(count: float, steps: int) -> float:
    return count / steps if steps else 0.0
