"""Prompts -> conversations: read, scrub, leave out duplicates, have the target answer, write token ids.

Prompts are answered in chunks, one shard each. Chunks and seeds follow from the prompts alone, so a run that
continues behind the last committed shard writes the rows that an undisturbed run would have written, and the
jobs of an array write the rows that one job would have written.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from stages.artifacts import (
    ArtifactWriter,
    Manifest,
    artifact_state,
    merge_parts,
    open_artifact,
    refuse_output,
    unfinished,
)
from stages.artifacts.conversations import shard_name, write_conversations
from stages.artifacts.counts import add_counts
from stages.config import several
from stages.decoding import GenerationResult
from stages.errors import EagleError
from stages.gen_data.config import GenDataConfig
from stages.gen_data.engines.start import load_for_engine, start_engine
from stages.gen_data.exclusion import Exclusion, allowed
from stages.gen_data.privacy.scrubber import Scrubber
from stages.gen_data.result import GenDataPlan, GenDataResult
from stages.gen_data.rollout import Answers, AnswerSettings, Dialogue, roll_out
from stages.gen_data.selection import (
    distinct,
    prompts_digest,
    read_sources,
    with_own_ids,
)
from stages.gen_data.stopping import stop_on_sigterm
from stages.gen_data.tally import KEPT, Tally, describe_left_out
from stages.progress import Reporter
from stages.prompts import Prompt
from stages.targets import Target, TemplateRefusalError
from stages.targets.chat_template import refuse_silent

TRIAL_TOKENS = 16
"""Tokens of each answer that `--dry-run` times."""


def run(config: GenDataConfig, report: Reporter) -> GenDataResult | GenDataPlan:
    """Raises EagleError: unreadable prompts, a target without chat template, nothing left to answer."""
    start = time.monotonic()
    if config.joins is not None:
        return GenDataResult.of(config.output, join_parts(config, config.joins), time.monotonic() - start)
    tally, scrubber = Tally(), Scrubber(config)
    scrubber.refuse_report()
    target = load_for_engine(config)  # first, and tried: reading the sources may take long
    answering = answer_settings(config)
    refuse_unusable(target, answering)
    settings = config.settings() | scrubber.settings()
    if not config.dry_run:
        refuse_output(
            config.output,
            "conversations",
            settings,
            target=target.fingerprint,
            overwrite=config.overwrite,
            part=config.part,
            unknown="prompts_digest",
        )
    chosen = choose(config, tally, scrubber, report)
    scrubber.write_report()
    if config.part is not None:
        index, number = config.part
        prompts = chosen[len(chosen) * index // number : len(chosen) * (index + 1) // number]
        if index > 0:  # what was left out is counted in one part
            tally = Tally()
            scrubber.forget_prompts()
    else:
        prompts = chosen
    prompts = fitting(target, prompts, answering, tally, report, needed=config.part is None)
    if config.dry_run:
        return plan(config, target, prompts, answering, tally, scrubber)
    with ArtifactWriter.open(
        config.output,
        "conversations",
        settings | {"prompts_digest": prompts_digest(chosen)},
        target=target.fingerprint,
        overwrite=config.overwrite,
        part=config.part,
    ) as writer:
        if writer.finished:
            return GenDataResult.of(writer.uri, writer.finished, seconds=0.0)
        answer(config, target, prompts, answering, scrubber, writer, report)
        counts = _counts(writer, tally, scrubber)
        if config.part is None:
            refuse_nothing(counts)
        manifest = writer.finish(counts)
    scrubber.write_report()
    return GenDataResult.of(writer.uri, manifest, seconds=time.monotonic() - start)


def answer_settings(config: GenDataConfig) -> AnswerSettings:
    return AnswerSettings(
        max_new_tokens=config.max_new_tokens,
        temperatures=config.temperatures,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed,
        batch_size=config.batch_size,
        samples=config.answers_per_prompt,
        drop_truncated=config.drop_truncated,
        max_model_len=config.max_model_len,
    )


def refuse_unusable(target: Target, answering: AnswerSettings) -> None:
    """Raises EagleError: the target has no chat template or none that shows the chat, or no room for a prompt
    beside an answer."""
    with suppress(TemplateRefusalError):  # of some prompts
        refuse_silent(target, f"the chat template of {target.name}")
    if answering.room(target) < 1:
        raise EagleError(
            f"--max-new-tokens {answering.max_new_tokens:,} leaves no room for a prompt in a context of "
            f"{answering.context(target):,} tokens: lower it"
        )


def choose(config: GenDataConfig, tally: Tally, scrubber: Scrubber, report: Reporter) -> list[Prompt]:
    """The prompts to answer: read, allowed, scrubbed, distinct, not more than asked for.

    Raises:
        EagleError: a source cannot be read, too many rows are no prompts, or none may be used.
    """
    exclusion = Exclusion.of(config.exclude, config.max_reject_rate)
    with report.task("reading prompts", total=config.max_prompts) as task:
        prompts = distinct(read_sources(config, config.seed, tally), 1, tally)
        prompts = allowed(prompts, exclusion, tally)
        prompts = scrubber.scrubbed(prompts, tally.count, config.max_prompts)
        prompts = with_own_ids(distinct(prompts, config.near_duplicates, tally))
        chosen = []
        for prompt in islice(prompts, config.max_prompts):
            chosen.append(prompt)
            task.advance()
    tally.close(Counter(prompt.source for prompt in chosen))
    tally.check(config.max_reject_rate, finished=True)
    if not chosen:
        raise EagleError(
            f"none of {several(tally.read, 'row')} may be answered ({tally.summary()}): use other --prompts"
        )
    return chosen


def fitting(
    target: Target,
    prompts: list[Prompt],
    answering: AnswerSettings,
    tally: Tally,
    report: Reporter,
    *,
    needed: bool,
) -> list[Prompt]:
    """The prompts whose first turn leaves room for an answer in the target's context; the others are counted.

    Args:
        needed: refuse to go on without any.

    Raises:
        EagleError: there is none, or the target has no chat template.
    """
    room = answering.room(target)
    fit, refusal = [], ""
    with report.task("measuring prompts", total=len(prompts)) as task:
        for prompt in prompts:
            dialogue = Dialogue(prompt)
            if dialogue.ask(target, room):
                fit.append(prompt)
            tally.count(prompt.source, dialogue.ended or KEPT)
            refusal = refusal or dialogue.refusal
            task.advance()
    if not fit and needed:
        raise EagleError(
            f"none of {several(len(prompts), 'prompt')} can be asked with "
            f"{several(answering.max_new_tokens, 'new token')} in "
            f"the target's context of {answering.context(target):,} ({tally.summary()}): "
            + (refusal or "lower --max-new-tokens, or use other prompts")
        )
    return fit


def plan(
    config: GenDataConfig,
    target: Target,
    prompts: list[Prompt],
    answering: AnswerSettings,
    tally: Tally,
    scrubber: Scrubber,
) -> GenDataPlan:
    """What a run with these prompts would do; times a few short answers."""
    trial = replace(answering, max_new_tokens=min(TRIAL_TOKENS, answering.max_new_tokens), samples=1)
    sampled = 0

    def count(result: GenerationResult, over: bool) -> None:
        nonlocal sampled
        sampled += len(result.token_ids)

    first_turns = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts[: config.batch_size]]
    with closing(start_engine(config, target)) as engine:
        start = time.monotonic()
        roll_out(target, first_turns, trial, engine, count)
        rate = sampled / (time.monotonic() - start)  # without the time that an engine takes to stop
    turns = sum(len(prompt.turns) for prompt in prompts) * answering.samples
    return GenDataPlan(
        output=config.output,
        sources=tally.record(),
        pii=scrubber.counts()["pii"],
        prompts=len(prompts) * answering.samples,
        turns=turns,
        tokens_per_s=round(rate, 1),
        most_seconds=round(turns * answering.max_new_tokens / rate, 1) if rate else 0.0,
    )


def answer(
    config: GenDataConfig,
    target: Target,
    prompts: list[Prompt],
    answering: AnswerSettings,
    scrubber: Scrubber,
    writer: ArtifactWriter,
    report: Reporter,
) -> None:
    """Has the target answer the prompts that no committed shard has, and commits a shard a chunk of them.

    Raises:
        KeyboardInterrupt: a termination signal came, and the shard that was under way is committed.
    """
    size = config.shard_rows
    chunks = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    done = len(writer.committed)
    if done == len(chunks):
        return
    total, answered = len(prompts) * answering.samples, sum(map(len, chunks[:done])) * answering.samples
    sampled = 0
    with (
        closing(start_engine(config, target)) as engine,
        report.task("answers", total=total, unit="prompts", done=answered) as task,
        stop_on_sigterm(report) as stop,
    ):
        start = time.monotonic()

        def show(result: GenerationResult, over: bool) -> None:
            nonlocal sampled
            sampled += len(result.token_ids)
            task.note(f"{sampled:,} tokens, {sampled / (time.monotonic() - start):,.0f} tok/s")
            task.advance(over)

        for number, chunk in enumerate(chunks[done:], start=done):
            answers = roll_out(target, chunk, answering, engine, show, scrubber.check_answers)
            data = write_conversations(answers.rows)
            writer.add_shard(shard_name(number), data, rows=len(answers.rows), note=_note(answers, scrubber))
            answered += len(chunk) * answering.samples
            task.advance(answered - task.done)  # dialogues that ended for want of room
            if stop.asked and number + 1 < len(chunks):
                raise KeyboardInterrupt


def join_parts(config: GenDataConfig, number: int) -> Manifest:
    """Makes one artifact of the parts of a job array, or finds it made.

    Raises:
        EagleError: a part is missing, or was made with other settings.
    """
    digest, target = None, None  # those of the parts, whatever the sources and the target are by now
    if (begun := unfinished(config.output)) is not None:
        digest, target = begun.run.config.get("prompts_digest"), begun.run.target
    elif artifact_state(config.output) == "complete":
        made = open_artifact(config.output, "conversations").manifest
        digest, target = made.config.get("prompts_digest"), made.target
    settings = config.settings() | Scrubber(config).settings() | {"prompts_digest": digest}

    def add(parts: list[dict[str, Any]]) -> dict[str, Any]:
        counts = add_counts(parts)
        refuse_nothing(counts)
        return counts

    return merge_parts(config.output, "conversations", settings, (), target, number, add)


def refuse_nothing(counts: dict[str, Any]) -> None:
    """Raises EagleError: no conversation came of any prompt, so that the artifact would be of no use."""
    if not counts["rows"]:
        left_out = describe_left_out(counts["sources"])
        raise EagleError(
            f"no prompt came to a conversation ({left_out}): change the settings, or use other prompts"
        )


def _note(answers: Answers, scrubber: Scrubber) -> dict[str, Any]:
    """What a shard adds to the artifact's counts."""
    rows = answers.rows
    return {
        "rows": len(rows),
        "tokens": sum(len(row.input_ids) for row in rows),
        "response_tokens": sum(sum(row.loss_mask) for row in rows),
        "cut_rows": sum(row.finish_reason == "length" for row in rows),
        "left_out": answers.left_out,
        "ended": answers.ended,
        **scrubber.take_answer_counts(),
    }


def _counts(writer: ArtifactWriter, tally: Tally, scrubber: Scrubber) -> dict[str, Any]:
    none = _note(Answers([], {}, {}), scrubber)
    counts = add_counts([none, *(committed.note for committed in writer.committed)])
    for source, reasons in counts.pop("left_out").items():
        for reason, prompts in reasons.items():
            tally.count(source, reason, prompts)
            tally.count(source, KEPT, -prompts)
    return counts | {"sources": tally.record()} | scrubber.counts()
