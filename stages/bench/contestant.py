"""Who answers in a sweep: a drafter (or none) in this process, or an endpoint."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from stages.bench.memory import own_gpu_peak, own_peak
from stages.bench.record import Sample, Turn
from stages.bench.workload import Job
from stages.decoding import DecodeStats, EagleModel, GenerationRequest, SamplingParams

WARM_UP_TOKENS = 16
PLAIN = "plain"
WITH_TREE = ", "
"""Between a drafter and its tree, where several trees are compared."""


def warm_up_params(params: SamplingParams) -> SamplingParams:
    """For the answers that get a contestant going."""
    return replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens))


class Contestant(Protocol):
    """Answers jobs, `concurrency` of them under way at all times while there are more."""

    name: str

    def turn(self) -> AbstractContextManager[object]:
        """Entered while it has the machine."""

    def warm_up(self, job: Job, concurrency: int, params: SamplingParams) -> None:
        """Answers briefly and forgets it: first calls pay for allocation and kernel selection."""

    def answer(
        self,
        jobs: Sequence[tuple[int, Job]],
        concurrency: int,
        params: SamplingParams,
        due: Sequence[float] | None = None,
    ) -> Turn:
        """All of the jobs; numbers are theirs in the workload.

        Args:
            due: when each of them comes, in seconds from the start, ascending; latencies count from then.
                None: as soon as there is room for it.
        """


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

    def turn(self) -> AbstractContextManager[object]:
        return nullcontext()

    def warm_up(self, job: Job, concurrency: int, params: SamplingParams) -> None:
        short = replace(warm_up_params(params), ignore_eos=True)
        self.answer([(number, job) for number in range(concurrency)], concurrency, short)

    def answer(
        self,
        jobs: Sequence[tuple[int, Job]],
        concurrency: int,
        params: SamplingParams,
        due: Sequence[float] | None = None,
    ) -> Turn:
        waiting, flights = deque(jobs), dict[str, _Flight]()
        times = deque(due or ())
        samples: list[Sample] = []
        prefill_s = draft_s = verify_s = 0.0
        begin = time.perf_counter()
        while waiting or flights:
            now = time.perf_counter() - begin
            while waiting and (times[0] <= now if due is not None else len(flights) < concurrency):
                number, job = waiting.popleft()
                sent = time.perf_counter() if due is None else begin + times.popleft()
                flights[str(number)] = _Flight(number, sent)
                self._engine.submit(GenerationRequest(str(number), list(job.prompt_ids), job.params(params)))
            if not flights:
                time.sleep(times[0] - now)
                continue
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
            peak_memory=own_peak(),
            peak_gpu_memory=own_gpu_peak(),
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
        ours=True,
        steps=stats.steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        accepted_per_depth=tuple(stats.accepted_per_depth),
    )
