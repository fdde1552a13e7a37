"""Head -> report: answer every prompt plainly and with EAGLE, compare, explain the differences, count.

Both ways run on the same engine, one right after the other, with the same cap and stop rules; losslessness is
then looked at in float32. Records are committed on the way, so that the same command run again continues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from stages.artifacts import ArtifactWriter, join, open_artifact
from stages.bench import parity
from stages.bench.config import BenchConfig
from stages.bench.hardware import hardware
from stages.bench.journal import Journal
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
from stages.bench.measure import answer_again, measure_prompt, spread, warm_up
from stages.bench.metrics import speedup
from stages.bench.parity import ParityResult
from stages.bench.prompt_sets import PromptSet, opening, read_prompt_sets, require_answerable
from stages.bench.record import Measured, Recheck
from stages.bench.report import REPORT_NAME, BenchReport, make_report
from stages.bench.result import BenchResult
from stages.decoding import EagleModel, SamplingParams, TreeConfig
from stages.errors import EagleError
from stages.progress import Reporter

# In the artifact's config under other names, or not deciding the result.
_NOT_IN_SETTINGS = {
    "target",
    "chat_template",
    "head",
    "prompts",
    "num_prompts",
    "output",
    "overwrite",
    "verify",
    "device",
    "dtype",
    "parity",
    "parity_rows",
    "trained_on",
}


def run(config: BenchConfig, report: Reporter) -> BenchResult | ParityResult:
    """Raises EagleError: inputs that do not fit, prompts beyond the context, or, after the report, faults."""
    if config.parity:
        return parity.run(config, report)
    start = time.monotonic()
    head = open_artifact(config.head, "head", config.verify)
    tree = TreeConfig.parse(config.tree)
    sets = read_prompt_sets(config.prompts, config.num_prompts)
    model = EagleModel.from_pretrained(
        config.target,
        config.head,
        device=config.device,
        dtype=config.dtype,
        tree=tree,
        chat_template=config.chat_template,
        verify=config.verify,
    )
    require_answerable(sets, model.target)
    with ArtifactWriter.open(
        config.output,
        "report",
        _artifact_config(config, sets, model),
        parents=[head.parent()],
        target=model.target.fingerprint,
        overwrite=config.overwrite,
    ) as writer:
        if writer.finished:
            return _result(config, _read_report(config.output), seconds=0.0)
        machine, settings = hardware(model.target.device), _settings(config, model)
        measured = measure(model, sets, _sampling(config), writer, report)
        if settings["dtype"] != FLOAT32:
            del model  # makes room for the float32 one
            lossless = check_in_float32(config, measured, settings["dtype"], writer, report)
        else:
            lossless = check_directly(config, measured, model)
        made = make_report(measured, lossless, machine, settings)
        writer.add_file(REPORT_NAME, made.to_json())
        writer.finish(_counts(made))
    return _result(config, made, seconds=time.monotonic() - start)


def measure(
    model: EagleModel,
    sets: Sequence[PromptSet],
    params: SamplingParams,
    writer: ArtifactWriter,
    report: Reporter,
) -> list[Measured]:
    """Answers the prompts that no earlier run has, both ways, set by set."""
    journal = Journal(writer, "requests", Measured)
    prompts = [(each.name, prompt) for each in sets for prompt in each.prompts]
    done = len(journal.records)
    if done < len(prompts):
        fitting = (model.target.render(opening(prompt)) for _, prompt in prompts)
        warm_up(model, next(ids for ids in fitting if len(ids) < model.target.max_length), params)
    with report.task("prompts", total=len(prompts), unit="prompts", done=done) as task:
        for number, (name, prompt) in enumerate(prompts[done:], start=done):
            requests, skipped = measure_prompt(model, prompt, params, number)
            journal.add(Measured(set=name, prompt_id=prompt.id, requests=requests, skipped=skipped))
            if any(record.requests for record in journal.records):
                task.note(_so_far(journal.records))
            task.advance()
    journal.commit()
    return journal.records


def check_in_float32(
    config: BenchConfig, measured: Sequence[Measured], dtype: str, writer: ArtifactWriter, report: Reporter
) -> Lossless:
    """Explains each difference, and answers some prompts again, with the target and the head in float32."""
    journal = Journal(writer, "float32", Recheck)
    answered = [number for number, record in enumerate(measured) if record.requests]
    chosen = [answered[i] for i in spread(len(answered), config.check_float32)]
    found = differences(measured, dtype)
    divergences: list[Divergence] = []
    if found or chosen:
        model = EagleModel.from_pretrained(
            config.target,
            config.head,
            device=config.device,
            dtype=FLOAT32,
            tree=config.tree,
            chat_template=config.chat_template,
            verify=config.verify,
        )
        done = len(journal.records)
        with report.task("float32 check", total=len(chosen), unit="prompts", done=done) as task:
            for number in chosen[done:]:
                requests = answer_again(model, measured[number].requests, _sampling(config))
                journal.add(Recheck(prompt=number, requests=requests))
                task.advance()
        journal.commit()
        found += differences(as_measured(measured, journal.records), FLOAT32)
        divergences = _explain_all(config, model, found, report)
    rechecked = as_measured(measured, journal.records)
    return verdict(measured, rechecked, divergences, config.near_tie_gap, dtype=dtype)


def check_directly(config: BenchConfig, measured: Sequence[Measured], model: EagleModel) -> Lossless:
    """Of a run in float32, which is its own check."""
    found = differences(measured, FLOAT32)
    divergences = [explain(model.target, each, _sampling(config), config.near_tie_gap) for each in found]
    return verdict(measured, [], divergences, config.near_tie_gap, dtype=FLOAT32)


def _explain_all(
    config: BenchConfig, model: EagleModel, found: Sequence[Difference], report: Reporter
) -> list[Divergence]:
    divergences = []
    with report.task("differences", total=len(found)) as task:
        for difference in found:
            divergences.append(explain(model.target, difference, _sampling(config), config.near_tie_gap))
            task.advance()
    return divergences


def _sampling(config: BenchConfig) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed
    )


def _artifact_config(config: BenchConfig, sets: Sequence[PromptSet], model: EagleModel) -> dict[str, Any]:
    """What decides the result, besides the target and the head, which have digests of their own."""
    return config.model_dump(mode="json", exclude=_NOT_IN_SETTINGS) | {
        "prompts": [each.identity() for each in sets],
        "tree": str(model.tree),
        "device": model.target.device.type,
    }


def _settings(config: BenchConfig, model: EagleModel) -> dict[str, Any]:
    """The flags as given, with what they stood for on this machine."""
    return config.model_dump(mode="json", exclude={"overwrite"}) | {
        "tree": str(model.tree),
        "device": model.target.device.type,
        "dtype": str(model.target.dtype).removeprefix("torch."),
    }


def _so_far(measured: Sequence[Measured]) -> str:
    return f"speed-up {speedup(measured):.2f}"


def _counts(made: BenchReport) -> dict[str, Any]:
    pooled, lossless = made.pooled, made.lossless
    return {
        "prompts": pooled.prompts,
        "requests": pooled.requests,
        "skipped": pooled.skipped,
        "tokens": pooled.eagle.tokens,
        "speedup": round(pooled.speedup, 4),
        "identical": lossless.identical,
        "near_ties": lossless.near_ties,
        "faults": lossless.faults,
    }


def _read_report(uri: str) -> BenchReport:
    return BenchReport.model_validate_json(open_artifact(uri, "report").read(REPORT_NAME))


def _result(config: BenchConfig, made: BenchReport, seconds: float) -> BenchResult:
    """The result, unless there are faults: then the report stands, and the run has failed."""
    where = join(config.output, REPORT_NAME)
    faults = [each for each in made.lossless.divergences if each.fault]
    if faults:
        first = faults[0]
        gap = "" if first.gap is None else f", {first.gap:.3f} logits from the best in float32"
        raise EagleError(
            f"{len(faults)} of EAGLE-3's answers are not the target's own; the first: set {first.set}, "
            f"prompt {first.prompt_id}, turn {first.turn}, {first.dtype}, output token {first.position} is "
            f"{_token(first.eagle_token)} and not {_token(first.plain_token)}{gap}: no head can cause this, "
            f"so report it as a bug with {where}, or raise --near-tie-gap if the gaps there are small"
        )
    return BenchResult(
        output=config.output,
        report=where,
        dtype=made.settings["dtype"],
        sets=made.sets,
        pooled=made.pooled,
        lossless=made.lossless,
        seconds=seconds,
    )


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)
