"""Prompts -> conversations: read, scrub, leave out duplicates, have the target answer, write token ids.

Prompts are answered in chunks, one shard each. Chunks and seeds follow from the prompts alone, so a run that
continues behind the last committed shard writes the rows that an undisturbed run would have written.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from pydantic import BaseModel

from stages.artifacts.conversations import Conversation, shard_name, write_conversations
from stages.artifacts.manifest import Manifest
from stages.artifacts.store import ArtifactWriter
from stages.decoding import GenerationResult
from stages.errors import EagleError
from stages.gen_data.config import GenDataConfig
from stages.gen_data.pii import Scrubber
from stages.gen_data.rollout import AnswerSettings, Dialogue, roll_out
from stages.gen_data.selection import (
    Exclusion,
    allowed,
    distinct,
    prompts_digest,
    read_sources,
    with_own_ids,
)
from stages.gen_data.tally import KEPT, Tally, describe_left_out
from stages.progress import Reporter
from stages.prompts import Prompt
from stages.targets import Target, load_target


class GenDataResult(BaseModel):
    """What the stage made, or found complete (`seconds` 0).

    Attributes:
        response_tokens: tokens that the target sampled, of `tokens` in all.
        cut_rows: rows whose last answer was cut at the longest answer allowed.
        sources: by source, the rows `read`, those `kept`, and those left out by reason.
        pii: findings that were replaced, by kind.
    """

    output: str
    rows: int
    tokens: int
    response_tokens: int
    cut_rows: int
    prompts_read: int
    sources: dict[str, dict[str, int]]
    pii: dict[str, int]
    shards: int
    bytes: int
    seconds: float

    def summary(self) -> str:
        made = f"in {self.seconds:.1f} s" if self.seconds else "already complete"
        left_out = describe_left_out(self.sources)
        notes = [
            f"left out: {left_out}" if left_out else "",
            f"replaced: {', '.join(f'{n:,} {kind}' for kind, n in self.pii.items())}" if self.pii else "",
        ]
        return "; ".join(
            [
                f"{self.output}: {self.rows:,} conversations, {self.response_tokens:,} response tokens of "
                f"{self.tokens:,}, {self.cut_rows:,} answers cut",
                *filter(None, notes),
                f"{self.shards} shards, {made}",
            ]
        )


def run(config: GenDataConfig, report: Reporter) -> GenDataResult:
    """Raises EagleError: unreadable prompts, a target without chat template, nothing left to answer."""
    start = time.monotonic()
    tally, scrubber = Tally(), Scrubber()
    prompts = choose(config, tally, scrubber, report)
    target = load_target(config.target, device=config.device, dtype=config.dtype)
    answering = AnswerSettings(
        config.max_new_tokens, config.temperature, config.top_p, config.seed, config.batch_size
    )
    prompts = fitting(target, prompts, answering, tally)
    with ArtifactWriter.open(
        config.output,
        "conversations",
        config.settings() | {"prompts_digest": prompts_digest(prompts)},
        target=target.fingerprint,
        overwrite=config.overwrite,
    ) as writer:
        if writer.finished:
            return _result(config.output, writer.finished, seconds=0.0)
        answer(target, prompts, answering, writer, config.shard_rows, report)
        manifest = writer.finish(_counts(writer, tally, scrubber))
    return _result(config.output, manifest, seconds=time.monotonic() - start)


def choose(config: GenDataConfig, tally: Tally, scrubber: Scrubber, report: Reporter) -> list[Prompt]:
    """The prompts to answer: read, allowed, scrubbed, distinct, not more than asked for.

    Raises:
        EagleError: a source cannot be read, too many rows are no prompts, or none may be used.
    """
    exclusion = Exclusion.of(config.exclude)
    with report.task("reading prompts", total=config.max_prompts) as task:
        prompts = distinct(read_sources(config, config.seed, tally), 1, tally)
        prompts = allowed(prompts, exclusion, tally)
        if config.pii == "redact":
            prompts = scrubbed(prompts, scrubber, tally)
        prompts = with_own_ids(distinct(prompts, config.near_duplicates, tally))
        chosen = []
        for prompt in islice(prompts, config.max_prompts):
            chosen.append(prompt)
            task.advance()
    tally.check(config.max_reject_rate, finished=True)
    if not chosen:
        raise EagleError(
            f"none of {tally.read:,} rows may be answered ({tally.summary()}): use other --prompts"
        )
    return chosen


def scrubbed(prompts: Iterable[Prompt], scrubber: Scrubber, tally: Tally) -> Iterator[Prompt]:
    """The prompts with placeholders for personal data; those that cannot be scanned are counted."""
    for prompt in prompts:
        clean = scrubber.scrub(prompt)
        if clean is None:
            tally.count(prompt.source, "unscannable")
        else:
            yield clean


def fitting(target: Target, prompts: list[Prompt], answering: AnswerSettings, tally: Tally) -> list[Prompt]:
    """The prompts whose first turn leaves room for an answer in the target's context; the others are counted.

    Raises:
        EagleError: none does, or the target has no chat template.
    """
    room = answering.room(target)
    fit = []
    for prompt in prompts:
        if Dialogue(prompt).ask(target, room):
            tally.count(prompt.source, KEPT)
            fit.append(prompt)
        else:
            tally.count(prompt.source, "too_long")
    if not fit:
        raise EagleError(
            f"none of {len(prompts):,} prompts leaves room for {answering.max_new_tokens:,} new tokens "
            f"in the target's context of {target.max_length:,}: lower --max-new-tokens or shorten prompts"
        )
    return fit


def answer(
    target: Target,
    prompts: list[Prompt],
    answering: AnswerSettings,
    writer: ArtifactWriter,
    shard_rows: int,
    report: Reporter,
) -> None:
    """Has the target answer the prompts that no committed shard has, and commits a shard a chunk of them."""
    chunks = [prompts[i : i + shard_rows] for i in range(0, len(prompts), shard_rows)]
    done = len(writer.committed)
    answered = sum(map(len, chunks[:done]))
    sampled, start = 0, time.monotonic()
    with report.task("answers", total=len(prompts), unit="prompts", done=answered) as task:

        def show(result: GenerationResult, over: bool) -> None:
            nonlocal sampled
            sampled += len(result.token_ids)
            task.note(f"{sampled:,} tokens, {sampled / (time.monotonic() - start):,.0f} tok/s")
            task.advance(over)

        for number, chunk in enumerate(chunks[done:], start=done):
            rows = roll_out(target, chunk, answering, show)
            writer.add_shard(shard_name(number), write_conversations(rows), rows=len(rows), note=_note(rows))
            answered += len(chunk)
            task.advance(answered - task.done)  # dialogues that ended for want of room


def _note(rows: list[Conversation]) -> dict[str, int]:
    """What a shard adds to the artifact's counts."""
    return {
        "rows": len(rows),
        "tokens": sum(len(row.input_ids) for row in rows),
        "response_tokens": sum(sum(row.loss_mask) for row in rows),
        "cut_rows": sum(row.finish_reason == "length" for row in rows),
    }


def _counts(writer: ArtifactWriter, tally: Tally, scrubber: Scrubber) -> dict[str, Any]:
    notes = [committed.note for committed in writer.committed]
    return {key: sum(note[key] for note in notes) for key in notes[0]} | {
        "prompts_read": tally.read,
        "sources": tally.record(),
        "pii": dict(sorted(scrubber.found.items())),
    }


def _result(output: str, manifest: Manifest, seconds: float) -> GenDataResult:
    made = {
        "output": output,
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "seconds": seconds,
    }
    return GenDataResult.model_validate(manifest.counts | made)
