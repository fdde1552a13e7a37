"""Head -> report: answer every prompt plainly and with EAGLE, compare, explain the differences, count.

Both ways run on the same engine, one right after the other, with the same cap and stop rules. A sweep then
asks the same requests many at once, of all drafters and endpoints in turns. Losslessness is looked at in
float32. Records are committed on the way, so that the same command run again continues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from stages.artifacts import Artifact, ArtifactWriter, artifact_state, join, open_artifact
from stages.bench import compare, parity
from stages.bench.compare import Comparison
from stages.bench.config import BenchConfig
from stages.bench.contestant import Contestant
from stages.bench.hardware import hardware
from stages.bench.journal import Journal
from stages.bench.judgement import judge
from stages.bench.levels import Sweep, make_sweep
from stages.bench.line_up import LineUp, load_line_up, parse_drafters
from stages.bench.load import loads_of
from stages.bench.lossless import (
    Lossless,
)
from stages.bench.measure import measure_prompt, warm_up
from stages.bench.memory import own_gpu_peak, own_peak
from stages.bench.metrics import speedup
from stages.bench.page import PAGE_NAME, make_page, pictures, stalls
from stages.bench.parity import ParityResult
from stages.bench.prompt_sets import (
    PromptSet,
    at_temperatures,
    by_answer_length,
    by_prompt_length,
    opening,
    read_prompt_sets,
    require_answerable,
)
from stages.bench.record import Measured, Turn
from stages.bench.report import REPORT_NAME, SCHEMA_NAME, BenchReport, make_report
from stages.bench.result import BenchResult, title
from stages.bench.sampling import of_set, sampling
from stages.bench.servers import endpoints, launched, require_own_names, require_servers
from stages.bench.settings import artifact_config, as_given, settings_of
from stages.bench.sweep import require_enough, run_sweep
from stages.bench.workload import Job, first_turns, jobs_of
from stages.decoding import EagleModel, SamplingParams, TreeConfig
from stages.errors import EagleError
from stages.progress import Reporter
from stages.targets.tokenizer import load_tokenizer


def run(config: BenchConfig, report: Reporter) -> BenchResult | ParityResult | Comparison:
    """Raises EagleError: inputs that do not fit, prompts beyond the context, or, after the report, faults or
    less speed than was asked for."""
    if config.compare is not None:
        return compare.run(config.compare, config.fail_below)
    if config.parity:
        return parity.run(config, report)
    start = time.monotonic()
    heads = [open_artifact(uri, "head", config.verify) for uri in config.head]
    for tree in config.tree:
        TreeConfig.parse(tree)
    parse_drafters(config.drafters)
    if config.overwrite or artifact_state(config.output) != "complete":
        require_servers(config)
    sets = read_prompt_sets(config.prompts, config.num_prompts)
    sets = by_answer_length(_by_prompt_length(config, sets), config.answer_lengths)
    require_enough(sum(_most_requests(config, each) for each in sets), config.levels)
    sets = at_temperatures(sets, config.temperatures)
    line_up = load_line_up(config, heads, config.dtype) if config.in_process else None
    if line_up is not None:
        require_own_names(config, line_up)
        require_answerable(sets, line_up.target)
    with ArtifactWriter.open(
        config.output,
        "report",
        artifact_config(config, sets, line_up),
        parents=[head.parent() for head in heads],
        target=None if line_up is None else line_up.target.fingerprint,
        overwrite=config.overwrite,
    ) as writer:
        if writer.finished:
            return _result(config, *_read_report(config.output), seconds=0.0)
        if line_up is None:
            made = measure_endpoints(config, sets, writer, report)
        else:
            made = measure_target(config, sets, line_up, heads, writer, report)
        for line in stalls(made):
            report.log(line)
        writer.add_file(REPORT_NAME, made.to_json())
        writer.add_file(SCHEMA_NAME, BenchReport.schema_file())
        writer.add_file(PAGE_NAME, make_page(made))
        for name, picture in pictures(made, report.log).items():
            writer.add_file(name, picture)
        writer.finish(_counts(made))
    page = join(config.output, PAGE_NAME)
    return _result(config, made, page, seconds=time.monotonic() - start)


def measure_target(
    config: BenchConfig,
    sets: Sequence[PromptSet],
    line_up: LineUp,
    heads: Sequence[Artifact],
    writer: ArtifactWriter,
    report: Reporter,
) -> BenchReport:
    """Plain decoding and the main drafter one request at a time, then everyone many at once, then whether
    the texts are the same."""
    machine, settings, main = hardware(line_up.target.device), settings_of(config, line_up), line_up.main
    measured = measure(line_up.model, sets, sampling(config), writer, report)
    jobs: list[Job] = []
    turns: list[Turn] = []
    sweep = None
    if config.levels:
        jobs = jobs_of(sets, measured, line_up.target)
        turns, sweep = measure_sweep(config, line_up.contestants(), jobs, writer, report)
    lossless = None
    if config.check_lossless:
        lossless = judge(config, sets, line_up, heads, measured, (turns, jobs), writer, report)
    return make_report(
        measured,
        lossless,
        machine,
        settings,
        drafter=main,
        sweep=sweep,
        temperatures={each.name: each.temperature for each in sets},
        peaks=(own_peak(), own_gpu_peak()),
    )


def measure_endpoints(
    config: BenchConfig, sets: Sequence[PromptSet], writer: ArtifactWriter, report: Reporter
) -> BenchReport:
    """Servers alone: nothing says what their text should be."""
    _, sweep = measure_sweep(config, [], first_turns(sets), writer, report)
    settings = as_given(config)
    return make_report([], None, hardware(torch.device("cpu")), settings, sweep=sweep)


def measure(
    model: EagleModel,
    sets: Sequence[PromptSet],
    params: SamplingParams,
    writer: ArtifactWriter,
    report: Reporter,
) -> list[Measured]:
    """Answers the prompts that no earlier run has, both ways, set by set."""
    prompts = [(each, prompt) for each in sets for prompt in each.prompts]
    with (
        Journal(writer, "requests", Measured) as journal,
        report.task("prompts", total=len(prompts), unit="prompts", done=len(journal.records)) as task,
    ):
        done = len(journal.records)
        if done < len(prompts):
            fitting = (model.target.render(opening(prompt)) for _, prompt in prompts)
            warm_up(model, next(ids for ids in fitting if len(ids) < model.target.max_length), params)
        for number, (own, prompt) in enumerate(prompts[done:], start=done):
            chosen = of_set(params, own)
            requests, skipped = measure_prompt(model, prompt, chosen, number)
            journal.add(Measured(set=own.name, prompt_id=prompt.id, requests=requests, skipped=skipped))
            if any(record.requests for record in journal.records):
                task.note(_so_far(journal.records))
            task.advance()
    return journal.records


def measure_sweep(
    config: BenchConfig,
    engines: Sequence[Contestant],
    jobs: Sequence[Job],
    writer: ArtifactWriter,
    report: Reporter,
) -> tuple[list[Turn], Sweep]:
    """Engines of this process, endpoints, and servers that are started here and stopped again, in turns."""
    require_enough(len(jobs) // len(config.temperatures), config.levels)
    reached = endpoints(config)
    with launched(config, jobs, report) as started:
        servers = [*reached, *started]
        contestants = [*engines, *servers]
        names = [each.name for each in contestants]
        loads, params = loads_of(config), sampling(config)
        turns = run_sweep(contestants, jobs, loads, config.repeat, params, writer, report)
    return turns, make_sweep(turns, jobs, names, [each.name for each in servers], config.repeat)


def _by_prompt_length(config: BenchConfig, sets: Sequence[PromptSet]) -> list[PromptSet]:
    bounds = [int(part) for part in config.prompt_lengths.split(",") if part]
    if not bounds:
        return list(sets)
    tokenizer = load_tokenizer(config.target)
    return by_prompt_length(sets, bounds, lambda text: len(tokenizer.encode(text)))


def _most_requests(config: BenchConfig, prompt_set: PromptSet) -> int:
    """That a set can give: without a target only first turns can be asked."""
    return sum(len(prompt.turns) if config.in_process else 1 for prompt in prompt_set.prompts)


def _so_far(measured: Sequence[Measured]) -> str:
    return f"speed-up {speedup(measured):.2f}"


def _counts(made: BenchReport) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    if made.pooled is not None:
        counts = {
            "prompts": made.pooled.prompts,
            "requests": made.pooled.requests,
            "skipped": made.pooled.skipped,
            "tokens": made.pooled.eagle.tokens,
            "speedup": round(made.pooled.speedup, 4),
        }
    if made.lossless is not None:
        counts |= {
            "identical": made.lossless.identical,
            "near_ties": made.lossless.near_ties,
            "faults": made.lossless.faults,
        }
    if made.sweep is not None:
        counts["swept"] = sum(level.completed for level in made.sweep.levels)
    return counts


def _read_report(uri: str) -> tuple[BenchReport, str | None]:
    """A complete one, and where its page is; reports of older versions have none."""
    artifact = open_artifact(uri, "report")
    paged = any(file.path == PAGE_NAME for file in artifact.manifest.files)
    made = compare.read_report(uri)
    return made, join(uri, PAGE_NAME) if paged else None


def _result(config: BenchConfig, made: BenchReport, page: str | None, *, seconds: float) -> BenchResult:
    """The result, unless there are faults or it is too slow: then the report stands, and the run has
    failed."""
    where = join(config.output, REPORT_NAME)
    if made.lossless is not None:
        _require_lossless(made.lossless, where)
    result = BenchResult(
        output=config.output,
        report=where,
        page=page,
        dtype=made.settings["dtype"],
        drafter=made.drafter,
        sets=made.sets,
        pooled=made.pooled,
        by_temperature=made.by_temperature,
        lossless=made.lossless,
        sweep=made.sweep,
        seconds=seconds,
    )
    if config.fail_below is not None:
        compare.require_speed(made, config.fail_below, config.output, result)
    return result


def _require_lossless(lossless: Lossless, where: str) -> None:
    faults = [each for each in lossless.divergences if each.fault]
    if not faults:
        return
    first = faults[0]
    gap = "" if first.gap is None else f", {first.gap:.3f} logits from the best in float32"
    whose = f", {title(first.drafter)}, {first.concurrency} at once" if first.drafter else ""
    raise EagleError(
        f"{len(faults)} answers are not the target's own; the first: set {first.set}, "
        f"prompt {first.prompt_id}, turn {first.turn}, {first.dtype}{whose}, output token {first.position} "
        f"is "
        f"{_token(first.eagle_token)} and not {_token(first.plain_token)}{gap}: no head can cause this, "
        f"so report it as a bug with {where}, or raise --near-tie-gap if the gaps there are small"
    )


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)
