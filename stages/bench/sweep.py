"""Many requests at once: all contestants answer the same workload in turns whose order changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from stages.artifacts import ArtifactWriter
from stages.bench.contestant import Contestant
from stages.bench.journal import Journal
from stages.bench.load import Load, due_times
from stages.bench.lossless import Difference, differences
from stages.bench.record import Measured, Output, Turn
from stages.bench.workload import Job, numbers_at
from stages.decoding import SamplingParams
from stages.errors import EagleError
from stages.progress import Reporter

MOST_ROUNDS = 8
FULL = 2
"""Requests of a round, times the concurrency: at its end fewer are under way, which must not weigh much."""


@dataclass(frozen=True)
class Step:
    """`contestant` (its place in the line-up) answers these requests, as the load says."""

    load: Load
    contestant: int
    requests: tuple[int, ...]
    round: int = 0


def plan(contestants: int, jobs: Sequence[Job], loads: Sequence[Load], repeat: int) -> list[Step]:
    """The turns: each round of requests goes to every contestant, in an order that no other round before had
    where there are enough rounds, so that a machine that slows down slows all alike."""
    steps = []
    for place, load in enumerate(loads):
        requests = numbers_at(jobs, load.temperature)
        rounds = max(1, min(MOST_ROUNDS, len(requests) // (FULL * load.concurrency)))
        bounds = [i * len(requests) // rounds for i in range(rounds + 1)]
        for number in range(rounds * repeat):
            begin, end = bounds[number % rounds : number % rounds + 2]
            for contestant in _order(contestants, number + place):
                steps.append(Step(load, contestant, tuple(requests[begin:end]), number))
    return steps


def _order(contestants: int, number: int) -> list[int]:
    """Rotated by one a time, and backwards in every second lap."""
    lap, shift = divmod(number, contestants)
    order = [(shift + i) % contestants for i in range(contestants)]
    return order[::-1] if lap % 2 and contestants > 2 else order


def require_enough(requests: int, levels: Sequence[int]) -> None:
    """Raises EagleError: there are not as many requests as are to be under way."""
    if levels and requests < levels[-1]:
        raise EagleError(
            f"--concurrency {levels[-1]} needs at least {levels[-1]} requests, and the prompts give "
            f"{requests}: give more prompts, or a lower concurrency"
        )


def run_sweep(
    contestants: Sequence[Contestant],
    jobs: Sequence[Job],
    loads: Sequence[Load],
    repeat: int,
    params: SamplingParams,
    writer: ArtifactWriter,
    report: Reporter,
) -> list[Turn]:
    """Measures what no earlier run has."""
    steps = plan(len(contestants), jobs, loads, repeat)
    warm: set[tuple[int, Load]] = set()
    answers = [len(step.requests) for step in steps]
    with (
        Journal(writer, "sweep", Turn) as journal,
        report.task(
            "sweep", total=sum(answers), unit="answers", done=sum(answers[: len(journal.records)])
        ) as task,
    ):
        for step in steps[len(journal.records) :]:
            contestant, load = contestants[step.contestant], step.load
            task.note(f"{contestant.name}, {load.words}")
            asked = [(number, jobs[number]) for number in step.requests]
            chosen = replace(params, temperature=load.temperature)
            due = None
            if load.rate is not None:  # the same for every contestant of the round
                due = due_times(len(asked), load.rate, (params.seed % 2**64, step.round, len(asked)))
            with _kept(writer), contestant.turn():
                if (step.contestant, load) not in warm:
                    contestant.warm_up(asked[0][1], load.concurrency, chosen)
                    warm.add((step.contestant, load))
                turn = contestant.answer(asked, load.concurrency, chosen, due)
            journal.add(turn.model_copy(update={"rate": load.rate, "temperature": load.temperature}))
            task.advance(len(asked))
    return journal.records


@contextmanager
def _kept(writer: ArtifactWriter) -> Iterator[None]:
    """A server that fails does not take with it what was measured before."""
    try:
        yield
    except EagleError as error:
        kept = f"what was measured before is kept at {writer.uri}, and the same command goes on from there"
        raise EagleError(f"{error}; {kept}") from error


def sweep_differences(turns: Sequence[Turn], jobs: Sequence[Job], dtype: str) -> list[Difference]:
    """Answers of this process's engines that are not plain decoding's, one at a time; each counts."""
    found = []
    for turn in turns:
        for measured in _against_plain(turn, jobs):
            found += differences([measured], dtype, turn.contestant, turn.concurrency)
    return found


def compared(turns: Sequence[Turn]) -> int:
    """Answers that `sweep_differences` looks at."""
    return sum(bool(sample.token_ids) for turn in turns for sample in turn.samples)


def _against_plain(turn: Turn, jobs: Sequence[Job]) -> Iterator[Measured]:
    for sample in turn.samples:
        job = jobs[sample.request]
        if sample.token_ids and job.plain is not None:
            answer = Output(
                token_ids=sample.token_ids,
                finish_reason="stop" if sample.finish_reason == "stop" else "length",
                prefill_s=sample.ttft_s,
                decode_s=sample.e2el_s - sample.ttft_s,
                draft_s=0.0,
                verify_s=0.0,
                steps=sample.steps,
                step_tokens=len(sample.token_ids) - 1,
                drafted=sample.drafted,
                accepted=sample.accepted,
                accepted_per_depth=sample.accepted_per_depth,
            )
            pair = job.plain.model_copy(update={"eagle": answer})
            yield Measured(set=job.set, prompt_id=job.prompt_id, requests=(pair,))
