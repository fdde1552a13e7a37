"""Features -> draft head: hold rows out, choose the draft vocabulary, train by training-time test, write the
head.

Features are read from an artifact, or taken from the target while the head trains. A checkpoint is written
about every minute, and when the run is told to stop; the same command run again continues from it, with the
same result. Several processes that torchrun started train one head together, and the first of them writes
it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from stages.artifacts import Artifact, ArtifactWriter, Manifest, Parent, artifact_state, open_artifact
from stages.errors import EagleError
from stages.features.index import RowIndex, label_counts
from stages.features.joined import offline_features
from stages.features.online import OnlineFeatures
from stages.features.source import FeatureSource
from stages.heads import DraftHead, head_files
from stages.progress import Reporter
from stages.targets import load_target
from stages.targets.chat_template import with_chat_template
from stages.train.chart import draw_chart
from stages.train.checkpoint import Checkpoint, Checkpoints, Progress, checkpoint_names, restore
from stages.train.config import TrainConfig
from stages.train.data import TrainingPlan, hold_out, most_held_out, plan_training
from stages.train.initial import initial_head, open_before, target_at_hand
from stages.train.loop import Loop
from stages.train.model_card import model_card
from stages.train.parity import confirm, require_parity
from stages.train.ranks import Ranks, joined
from stages.train.result import TrainResult
from stages.train.state import Best, TrainingState
from stages.train.stopping import StopSignal
from stages.train.trackers import tracking
from stages.train.training import Training, make_training, target_parameters
from stages.train.vocabulary import DraftVocabulary, choose_vocabulary

LEAST_COVERAGE = 0.5
"""Of the answers' tokens by the draft vocabulary: a head that can propose fewer is not trained."""

GOOD_COVERAGE = 0.8


def run(config: TrainConfig, report: Reporter) -> TrainResult | None:
    """None where another process of the same training has the result.

    Raises:
        EagleError: nothing to learn from, an output made otherwise, a loss that is not finite, or a finished
            head that does not draft as it was trained to.
    """
    start = time.monotonic()
    with joined(config.device) as ranks, closing(open_features(config, ranks, report)) as features:
        report = report if ranks.first else Reporter(quiet=True)
        before = open_artifact(config.init_from, "head", config.verify) if config.init_from else None
        finished = find_finished(config, features, before) if ranks.first else None
        if ranks.told(finished is not None):
            if finished is None:
                return None
            return confirmed(TrainResult.of(config.output, finished, seconds=0.0), finished)

        head_before = open_before(before, features.target) if before else None
        train_rows, held_out = choose_rows(features, config)
        vocabulary = choose_tokens(features, train_rows, head_before, config, report)
        with ExitStack() as closes:
            writer = closes.enter_context(_open_writer(config, features, before)) if ranks.first else None
            checkpoint = Checkpoint.find(writer) if writer else None
            if checkpoint:
                checkpoint.check_processes(ranks.size)
            window_bytes = config.window_bytes or features.window_bytes
            progress: Progress = ranks.told(
                checkpoint.progress
                if checkpoint
                else Progress(window_bytes=window_bytes, processes=ranks.size)
            )
            plan = plan_steps(features, train_rows, progress.window_bytes, config)
            head = initial_head(config, features, vocabulary, head_before, report)
            training = make_training(config, features, head, plan.steps, ranks)
            state = TrainingState(training.head, training.optimizer, Best(), ranks)
            if progress.step:
                restore(checkpoint, progress, state)
            loop = train(training, features, plan, held_out, progress, state, writer, config, report)
            state.best.put_back(training.head)
            head = training.whole_head()
            if writer is None:
                return None
            size = target_parameters(features.target_config)
            parity = confirm(
                head,
                loop.held_rows.batches(features),
                config.measured_steps,
                writer,
                target=target_to_try(config, features, report) if held_out else None,
                chat_template=config.chat_template,
                device=config.device,
                dtype=config.dtype,
                fingerprint=features.target,
                parameters=size,
                most_rows=config.parity_rows,
                report=report,
            )
            counts = {
                "head": config.head,
                "planned_steps": plan.steps,
                "ended_early": loop.ended,
                "train_rows": len(train_rows),
                "draft_vocab_size": len(vocabulary.ids),
                "draft_vocab_coverage": round(vocabulary.coverage, 5),
                "parameters": head.config.num_parameters,
                "target_parameters": size,
                "holdout_rows": len(held_out),
                "parity": parity.record() if parity else {},
            } | progress.counts()
            write_head(writer, head, progress, counts)
            card = model_card(config, features.target, _parents(features, before), counts)
            writer.add_file("README.md", card.encode())
            manifest = writer.finish(counts, drop=checkpoint_names(writer))
    return confirmed(TrainResult.of(config.output, manifest, seconds=time.monotonic() - start), manifest)


def confirmed(result: TrainResult, manifest: Manifest) -> TrainResult:
    """The result, unless decoding has not confirmed it: then the head stands, and the run has failed."""
    require_parity(manifest.counts["parity"], result.output, result)
    return result


def open_features(config: TrainConfig, ranks: Ranks, report: Reporter) -> FeatureSource:
    """Extracted features, or those that the target computes when they are needed.

    Raises:
        EagleError: several processes would each have the target compute all of them.
    """
    if config.features:
        artifacts = [open_artifact(uri, "features", config.verify) for uri in config.features]
        if config.needs_every_last:
            refuse_without_every_last(artifacts, config.head)
        return offline_features(artifacts)
    if ranks.size > 1:
        raise EagleError(
            f"features on the fly are for one process, and {ranks.size} train together: extract them first, "
            "with eagle extract-features, and give --features"
        )
    assert config.conversations is not None
    assert config.target is not None
    conversations = open_artifact(config.conversations, "conversations", config.verify)
    target = load_target(config.target, config.device, config.target_dtype, decodes=False)
    with_chat_template(target, config.chat_template)
    return OnlineFeatures(conversations, target, config, report)


def refuse_without_every_last(artifacts: Sequence[Artifact], kind: str) -> None:
    """Raises EagleError: features have the last state at supervised tokens only, too few for this kind."""
    lacking = [each.uri for each in artifacts if each.manifest.config.get("last") != "all"]
    if lacking:
        raise EagleError(
            f"a head of kind {kind} learns from the target's last state at every token, and "
            f"{', '.join(lacking)} {'has' if len(lacking) == 1 else 'have'} it at supervised ones only: "
            "extract "
            "with --last all"
        )


def find_finished(config: TrainConfig, features: FeatureSource, before: Artifact | None) -> Manifest | None:
    """The manifest of a head that is complete already, made in this way.

    Raises:
        EagleError: it was made in another.
    """
    if artifact_state(config.output) != "complete" or config.overwrite:
        return None
    return _open_writer(config, features, before).finished


def choose_rows(features: FeatureSource, config: TrainConfig) -> tuple[list[RowIndex], list[RowIndex]]:
    """The rows to train on, and those held out.

    Raises:
        EagleError: no row has anything to learn.
    """
    rows = [row for shard in features.shards for row in shard.rows]
    if not rows:
        raise EagleError(
            f"{features.parents[0].uri} has no supervised position, every loss mask is zero: make the "
            "conversations again with eagle gen-data, and features from them"
        )
    return hold_out(rows, config.holdout, config.seed, most_held_out(features.shards))


def choose_tokens(
    features: FeatureSource,
    rows: Sequence[RowIndex],
    before: DraftHead | None,
    config: TrainConfig,
    report: Reporter,
) -> DraftVocabulary:
    """The draft vocabulary: that of the head to start from, or the most frequent tokens of the training rows.

    Raises:
        EagleError: it leaves most of the answers out, or is not of the size asked for.
    """
    labels = label_counts(features.shards, rows, features.target_config["vocab_size"])
    if before is None:
        vocabulary = choose_vocabulary(labels, config.draft_vocab_size)
    else:
        vocabulary = DraftVocabulary.of(before.draft_ids, labels)
        if config.draft_vocab_size not in (0, len(vocabulary.ids)):
            raise EagleError(
                f"--draft-vocab-size {config.draft_vocab_size} is not that of {config.init_from}, which "
                f"drafts {len(vocabulary.ids):,} tokens: leave one of the two out"
            )
    size = len(vocabulary.ids)
    report.log(f"draft vocabulary of {size:,} tokens covers {vocabulary.coverage:.1%} of the answers")
    left_out = f"{1 - vocabulary.coverage:.0%} of the answers' tokens can never be drafted"
    advice = f"use a --draft-vocab-size above {size}, or 0 (automatic)"
    if before is not None:
        advice = "train anew, without --init-from"
    if vocabulary.coverage < LEAST_COVERAGE:
        raise EagleError(f"with a draft vocabulary of {size:,} tokens {left_out}: {advice}")
    if vocabulary.coverage < GOOD_COVERAGE:
        report.log(f"warning: {left_out}; {advice}")
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
    state: TrainingState,
    writer: ArtifactWriter | None,
    config: TrainConfig,
    report: Reporter,
) -> Loop:
    """Takes the steps of the plan that `progress` lacks."""
    if progress.step:
        report.log(f"training continues after step {progress.step:,} of {plan.steps:,}")
    if not held_out:
        report.log(
            "no conversation is held out, so nothing is measured that the head has not seen: see --holdout"
        )
    saves = Checkpoints(writer, config.checkpoint_seconds, config.keep_last)
    tracker = config.track if writer else None
    with tracking(tracker, config.output, config.result_settings()) as track, StopSignal() as stop:
        loop = Loop(training, features, plan, held_out, progress, state, saves, track, config, report)
        loop.run(stop)
    if loop.ended:
        report.log(f"training ends at step {progress.step:,} of {plan.steps:,}: {loop.ended}")
    return loop


def target_to_try(config: TrainConfig, features: FeatureSource, report: Reporter) -> str | None:
    """The target that the finished head is tried with; None where it would have to be fetched."""
    if config.parity_rows == 0:
        return None
    name = target_at_hand(config, features)
    if name is None:
        named = features.target.name if features.target else "the target"
        report.log(
            f"what is predicted is not confirmed by decoding, as {named} is not at hand: give "
            "--target, or use eagle bench --parity"
        )
    return name


def write_head(writer: ArtifactWriter, head: DraftHead, progress: Progress, counts: dict[str, Any]) -> None:
    """The folder that engines load, and beside it what training measured."""
    for name, data in head_files(head).items():
        writer.add_file(name, data)
    lines = "".join(json.dumps(line) + "\n" for line in progress.log)
    writer.add_file("metrics.jsonl", lines.encode())
    writer.add_file("metrics.json", (json.dumps(counts, indent=2) + "\n").encode())
    title = f"{counts['head']} head, {counts['parameters'] / 1e6:.1f} M parameters"
    writer.add_file("training.svg", draw_chart(progress.log, title).encode())


def _open_writer(config: TrainConfig, features: FeatureSource, before: Artifact | None) -> ArtifactWriter:
    return ArtifactWriter.open(
        config.output,
        "head",
        config.result_settings() | features.settings,
        parents=_parents(features, before),
        target=features.target,
        overwrite=config.overwrite,
    )


def _parents(features: FeatureSource, before: Artifact | None) -> list[Parent]:
    return [*features.parents, *([before.parent()] if before else [])]
