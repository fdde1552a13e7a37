"""Who answers in a sweep: a drafter (or none) in this process, or an endpoint."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from stages.bench.record import Sample, Turn
from stages.bench.workload import Job
from stages.decoding import DecodeStats, EagleModel, GenerationRequest, SamplingParams

WARM_UP_TOKENS = 16
PLAIN = "plain"


class Contestant(Protocol):
    """Answers jobs, `concurrency` of them under way at all times while there are more."""

    name: str

    def warm_up(self, job: Job, concurrency: int, params: SamplingParams) -> None:
        """Answers briefly and forgets it: first calls pay for allocation and kernel selection."""

    def answer(self, jobs: Sequence[tuple[int, Job]], concurrency: int, params: SamplingParams) -> Turn:
        """All of the jobs; numbers are theirs in the workload."""


@dataclass
class _Flight:
    """A request under way."""

    number: int
    sent: float
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    decode_s: float = 0.0


class InProcess:
    """An engine of this process."""

    def __init__(self, name: str, model: EagleModel) -> None:
        self.name = name
        self._engine = model.engine

    def warm_up(self, job: Job, concurrency: int, params: SamplingParams) -> None:
        short = SamplingParams(
            max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens),
            temperature=params.temperature,
            seed=params.seed,
            ignore_eos=True,
        )
        self.answer([(number, job) for number in range(concurrency)], concurrency, short)

    def answer(self, jobs: Sequence[tuple[int, Job]], concurrency: int, params: SamplingParams) -> Turn:
        waiting, flights = deque(jobs), dict[str, _Flight]()
        samples: list[Sample] = []
        prefill_s = draft_s = verify_s = 0.0
        begin = time.perf_counter()
        while waiting or flights:
            while waiting and len(flights) < concurrency:
                number, job = waiting.popleft()
                flights[str(number)] = _Flight(number, time.perf_counter())
                self._engine.submit(GenerationRequest(str(number), list(job.prompt_ids), params))
            before = time.perf_counter()
            emissions = self._engine.step()
            now = time.perf_counter()
            # All sequences of a step share its cycle, so any of them tells what it took.
            cycle = _Flight(0, 0.0)
            for each in emissions:
                _advance(flights[each.id], each.stats, cycle)
            draft_s, verify_s = draft_s + cycle.draft_s, verify_s + cycle.verify_s
            prefill_s += max(0.0, now - before - cycle.decode_s)
            for each in emissions:
                flight = flights[each.id]
                # A first token comes from the reading of its prompt, before the cycle.
                flight.arrivals.append(now if flight.arrivals else now - cycle.decode_s)
                flight.tokens += each.tokens
                if each.finish_reason is not None:
                    prompt = next(len(job.prompt_ids) for number, job in jobs if number == flight.number)
                    samples.append(_sample(flights.pop(each.id), prompt, each.finish_reason, each.stats))
        return Turn(
            contestant=self.name,
            concurrency=concurrency,
            duration_s=time.perf_counter() - begin,
            prefill_s=prefill_s,
            draft_s=draft_s,
            verify_s=verify_s,
            samples=tuple(sorted(samples, key=lambda sample: sample.request)),
        )


def _advance(flight: _Flight, stats: DecodeStats, cycle: _Flight) -> None:
    for name in ("draft_s", "verify_s", "decode_s"):
        new = getattr(stats, name)
        setattr(cycle, name, max(getattr(cycle, name), new - getattr(flight, name)))
        setattr(flight, name, new)


def _sample(flight: _Flight, prompt_tokens: int, reason: str, stats: DecodeStats) -> Sample:
    arrivals = flight.arrivals
    return Sample(
        request=flight.number,
        prompt_tokens=prompt_tokens,
        output_tokens=len(flight.tokens),
        ttft_s=arrivals[0] - flight.sent,
        e2el_s=arrivals[-1] - flight.sent,
        itl_s=tuple(round(b - a, 6) for a, b in pairwise(arrivals)),
        finish_reason=reason,
        token_ids=tuple(flight.tokens),
        steps=stats.steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        accepted_per_depth=tuple(stats.accepted_per_depth),
    )
