"""Features -> draft head: hold rows out, choose the draft vocabulary, train by training-time test, write the
head.

Features are read from an artifact, or taken from the target while the head trains. A checkpoint is written
about every minute; the same command run again continues from it, with the same result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from stages.artifacts import ArtifactWriter, artifact_state, open_artifact
from stages.errors import EagleError
from stages.features.index import RowIndex, label_counts
from stages.features.online import OnlineFeatures
from stages.features.source import FeatureSource, OfflineFeatures
from stages.heads import head_files
from stages.progress import Reporter
from stages.targets import load_target
from stages.targets.chat_template import with_chat_template
from stages.train.checkpoint import CHECKPOINT, Checkpoint, Progress, SaveClock, save_checkpoint
from stages.train.config import TrainConfig
from stages.train.data import TrainingPlan, hold_out, most_held_out, plan_training
from stages.train.loader import Loader
from stages.train.metrics import Interval, format_rates
from stages.train.reading import HeldOutRows, read_batches
from stages.train.result import NOTABLE_WAITING, TrainResult
from stages.train.training import Training, make_training, target_parameters
from stages.train.vocabulary import DraftVocabulary, choose_vocabulary

LOG_EVERY = 10
"""Optimizer steps in a line of metrics.jsonl."""

HOLDOUT_BATCH_TOKENS = 4096
LEAST_COVERAGE = 0.8


def run(config: TrainConfig, report: Reporter) -> TrainResult:
    """Raises EagleError: nothing to learn from, an output made otherwise, or a loss that is not finite."""
    start = time.monotonic()
    with closing(open_features(config, report)) as features:
        if artifact_state(config.output) == "complete" and not config.overwrite:
            finished = _open_writer(config, features).finished
            assert finished is not None
            return TrainResult.of(config.output, finished, seconds=0.0)

        train_rows, held_out = choose_rows(features, config)
        vocabulary = choose_tokens(features, train_rows, config, report)
        with _open_writer(config, features) as writer:
            checkpoint = Checkpoint.find(writer)
            window_bytes = config.window_bytes or features.window_bytes
            progress = checkpoint.progress if checkpoint else Progress(window_bytes=window_bytes)
            plan = plan_steps(features, train_rows, progress.window_bytes, config)
            training = make_training(config, features, vocabulary, plan.steps)
            if checkpoint:
                checkpoint.restore(training.head, training.optimizer)
            train(training, features, plan, held_out, progress, writer, config, report)
            counts = {
                "head": config.head,
                "steps": progress.step,
                "train_rows": len(train_rows),
                "train_tokens": progress.tokens,
                "draft_vocab_size": len(vocabulary.ids),
                "draft_vocab_coverage": round(vocabulary.coverage, 5),
                "parameters": training.head.config.num_parameters,
                "target_parameters": target_parameters(features.target_config),
                "window_bytes": progress.window_bytes,
                "waiting": round(progress.waiting, 4),
                "holdout_rows": len(held_out),
                "holdout": progress.holdout,
            }
            write_head(writer, training, progress, counts)
            manifest = writer.finish(counts, drop=[CHECKPOINT])
    return TrainResult.of(config.output, manifest, seconds=time.monotonic() - start)


def open_features(config: TrainConfig, report: Reporter) -> FeatureSource:
    """Extracted features, or those that the target computes when they are needed."""
    if config.features is not None:
        return OfflineFeatures(open_artifact(config.features, "features", config.verify))
    assert config.conversations is not None
    assert config.target is not None
    conversations = open_artifact(config.conversations, "conversations", config.verify)
    target = load_target(config.target, config.device, config.target_dtype, decodes=False)
    with_chat_template(target, config.chat_template)
    return OnlineFeatures(conversations, target, config, report)


def choose_rows(features: FeatureSource, config: TrainConfig) -> tuple[list[RowIndex], list[RowIndex]]:
    """The rows to train on, and those held out.

    Raises:
        EagleError: no row has anything to learn.
    """
    rows = [row for shard in features.shards for row in shard.rows]
    if not rows:
        raise EagleError(
            f"{features.parent.uri} has no supervised position, every loss mask is zero: make the "
            "conversations again with eagle gen-data, and features from them"
        )
    return hold_out(rows, config.holdout, config.seed, most_held_out(features.shards))


def choose_tokens(
    features: FeatureSource, rows: Sequence[RowIndex], config: TrainConfig, report: Reporter
) -> DraftVocabulary:
    """The draft vocabulary of the rows to train on, with a warning where it leaves much out."""
    labels = label_counts(features.shards, rows, features.target_config["vocab_size"])
    vocabulary = choose_vocabulary(labels, config.draft_vocab_size)
    size = len(vocabulary.ids)
    report.log(f"draft vocabulary of {size:,} tokens covers {vocabulary.coverage:.1%} of the answers")
    if vocabulary.coverage < LEAST_COVERAGE:
        report.log(
            f"warning: {1 - vocabulary.coverage:.0%} of the answers' tokens can never be drafted; "
            f"use a --draft-vocab-size above {size}, or 0 (automatic)"
        )
    return vocabulary


def plan_steps(
    features: FeatureSource, rows: Sequence[RowIndex], window_bytes: int, config: TrainConfig
) -> TrainingPlan:
    """The rows of each optimizer step."""
    sizes = [shard.bytes for shard in features.shards]
    plan = plan_training(rows, sizes, config.batch_tokens, config.epochs, config.seed, window_bytes)
    return plan.first(config.max_steps)


def train(
    training: Training,
    features: FeatureSource,
    plan: TrainingPlan,
    held_out: Sequence[RowIndex],
    progress: Progress,
    writer: ArtifactWriter,
    config: TrainConfig,
    report: Reporter,
) -> None:
    """Takes the steps of the plan that `progress` lacks, evaluating and saving on the way."""
    if progress.step:
        report.log(f"training continues after step {progress.step:,} of {plan.steps:,}")
    if not held_out:
        report.log(
            "no conversation is held out, so nothing is measured that the head has not seen: see --holdout"
        )
    evaluated = _evaluation_steps(plan, config.eval_every) if held_out else set()
    interval, saves = Interval(config.ttt_steps), SaveClock(config.checkpoint_seconds)
    began, before = time.monotonic() - progress.seconds, progress.waited
    held_rows = HeldOutRows(held_out, HOLDOUT_BATCH_TOKENS)
    rows = read_batches(features, plan.after(progress.step), held_rows)

    def log(measures: dict[str, Any]) -> None:
        progress.log_line(measures, time.monotonic() - began, before + loader.waited + held_rows.waited)

    with (
        report.task("training", total=plan.tokens, unit="tok", done=progress.tokens) as task,
        Loader(rows, training.batch, features.close) as loader,
    ):
        for batch in loader:
            losses = training.step(batch, progress.step)
            interval.add(losses)
            tokens = int(losses.asked[0])
            progress.step += 1
            progress.tokens += tokens
            task.advance(tokens)
            if progress.step % LOG_EVERY and progress.step not in evaluated and progress.step < plan.steps:
                continue
            log(interval.record())
            task.note(_note(interval, progress))
            interval = Interval(config.ttt_steps)
            if progress.step in evaluated:
                agreement = training.evaluate(map(training.batch, held_rows.batches(features)))
                report.log(f"step {progress.step:,} of {plan.steps:,}, held out: agreement {agreement}")
                log({"holdout": agreement.record()})
            if saves.due():
                with saves:
                    save_checkpoint(writer, training.head, training.optimizer, progress)


def write_head(
    writer: ArtifactWriter, training: Training, progress: Progress, counts: dict[str, Any]
) -> None:
    """The folder that engines load, and beside it what training measured."""
    for name, data in head_files(training.head).items():
        writer.add_file(name, data)
    lines = "".join(json.dumps(line) + "\n" for line in progress.log)
    writer.add_file("metrics.jsonl", lines.encode())
    writer.add_file("metrics.json", (json.dumps(counts, indent=2) + "\n").encode())


def _evaluation_steps(plan: TrainingPlan, every: int | None) -> set[int]:
    steps = plan.epoch_ends if every is None else range(every, plan.steps, every)
    return {*steps, plan.steps}


def _note(interval: Interval, progress: Progress) -> str:
    note = f"loss {interval.loss[0]:.3f}, agreement {format_rates(interval.agreement)}"
    if progress.waiting >= NOTABLE_WAITING:
        note += f", {progress.waiting:.0%} waiting for features"
    return note


def _open_writer(config: TrainConfig, features: FeatureSource) -> ArtifactWriter:
    return ArtifactWriter.open(
        config.output,
        "head",
        config.result_settings() | features.settings,
        parents=[features.parent],
        target=features.target,
        overwrite=config.overwrite,
    )
