"""Whether all answers of a run are plain decoding's, with an explanation of each that is not."""

from __future__ import annotations

from collections.abc import Sequence

from stages.artifacts import Artifact, ArtifactWriter
from stages.bench.config import BenchConfig
from stages.bench.journal import Journal
from stages.bench.line_up import LineUp, load_line_up
from stages.bench.lossless import (
    FLOAT32,
    Difference,
    Divergence,
    Lossless,
    as_measured,
    differences,
    explain,
    verdict,
)
from stages.bench.measure import answer_again, spread
from stages.bench.prompt_sets import PromptSet
from stages.bench.record import Measured, Recheck, Turn
from stages.bench.sampling import sampling_of
from stages.bench.sweep import compared, sweep_differences
from stages.bench.workload import Job
from stages.progress import Reporter
from stages.targets import Target


def judge(
    config: BenchConfig,
    sets: Sequence[PromptSet],
    line_up: LineUp,
    heads: Sequence[Artifact],
    measured: Sequence[Measured],
    swept: tuple[Sequence[Turn], Sequence[Job]],
    writer: ArtifactWriter,
    report: Reporter,
) -> Lossless:
    """Whether all answers, one at a time and `swept`, are plain decoding's, and why not; the models are gone
    after it."""
    dtype = str(line_up.target.dtype).removeprefix("torch.")
    parted = sweep_differences(*swept, dtype)
    found = differences(measured, dtype) + parted
    if dtype != FLOAT32:
        line_up.release()
        rechecks, divergences = check_in_float32(config, sets, heads, measured, found, writer, report)
    else:
        rechecks, divergences = [], _explain_all(config, sets, line_up.target, found, report)
    count = compared(swept[0])
    return verdict(
        measured,
        rechecks,
        divergences,
        config.near_tie_gap,
        dtype=dtype,
        swept=count,
        swept_identical=count - len(parted),
    )


def check_in_float32(
    config: BenchConfig,
    sets: Sequence[PromptSet],
    heads: Sequence[Artifact],
    measured: Sequence[Measured],
    found: Sequence[Difference],
    writer: ArtifactWriter,
    report: Reporter,
) -> tuple[list[Measured], list[Divergence]]:
    """Answers some prompts again with the target and the drafter in float32, and explains each difference,
    those found before and those there."""
    answered = [number for number, record in enumerate(measured) if record.requests]
    chosen = [answered[i] for i in spread(len(answered), config.check_float32)]
    if not found and not chosen:
        return [], []
    line_up = load_line_up(config, heads, FLOAT32, only_main=True)
    with (
        Journal(writer, "float32", Recheck) as journal,
        report.task("float32 check", total=len(chosen), unit="prompts", done=len(journal.records)) as task,
    ):
        for number in chosen[len(journal.records) :]:
            params = sampling_of(config, sets, measured[number].set)
            requests = answer_again(line_up.model, measured[number].requests, params)
            journal.add(Recheck(prompt=number, requests=requests))
            task.advance()
    rechecks = as_measured(measured, journal.records)
    found = [*found, *differences(rechecks, FLOAT32)]
    return rechecks, _explain_all(config, sets, line_up.target, found, report)


def _explain_all(
    config: BenchConfig,
    sets: Sequence[PromptSet],
    target: Target,
    found: Sequence[Difference],
    report: Reporter,
) -> list[Divergence]:
    """By the scores of a float32 target."""
    divergences = []
    with report.task("differences", total=len(found)) as task:
        for difference in found:
            params = sampling_of(config, sets, difference.set)
            divergences.append(explain(target, difference, params, config.near_tie_gap))
            task.advance()
    return divergences
