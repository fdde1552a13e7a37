"""Features -> draft head: hold rows out, choose the draft vocabulary, train by training-time test, write the
head.

A checkpoint is written about every minute; the same command run again continues from it, with the same
result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import BaseModel

from stages.artifacts import Artifact, ArtifactWriter, Manifest, artifact_state, open_artifact
from stages.features.layout import TARGET_FOLDER, read_target_weights
from stages.heads import Eagle3Config, Eagle3Head, head_files, init_from_target
from stages.progress import Reporter
from stages.targets import choose_device, logit_scale
from stages.train.checkpoint import CHECKPOINT, Progress, SaveClock, load_checkpoint, save_checkpoint
from stages.train.config import TrainConfig
from stages.train.data import FeatureRows, RowIndex, TrainingPlan, hold_out, plan_training, split_batches
from stages.train.metrics import Interval, format_rates
from stages.train.training import Recipe, TargetOutput, Training
from stages.train.vocabulary import DraftVocabulary, choose_vocabulary

LOG_EVERY = 10
"""Optimizer steps in a line of metrics.jsonl."""

HOLDOUT_BATCH_TOKENS = 4096
LEAST_COVERAGE = 0.8
_NOT_IN_RESULT = {"features", "output", "overwrite", "device", "dtype", "checkpoint_seconds"}


class TrainResult(BaseModel):
    """What the stage made, or found complete (`seconds` 0). Lists have an entry for each draft step."""

    output: str
    head: str
    steps: int
    train_rows: int
    train_tokens: int
    holdout_rows: int
    holdout_agreement: list[float]
    holdout_accepted_per_step: float
    holdout_tokens_per_step: float
    draft_vocab_size: int
    draft_vocab_coverage: float
    parameters: int
    target_parameters: int
    seconds: float

    def summary(self) -> str:
        share = self.parameters / self.target_parameters
        made = f"in {self.seconds:.0f} s" if self.seconds else "already complete"
        text = (
            f"{self.output}: {self.head} head of {self.parameters / 1e6:.1f} M parameters "
            f"({share:.1%} of the target's), {self.draft_vocab_size:,} draft tokens, "
            f"{self.steps:,} steps on {self.train_tokens:,} tokens, {made}"
        )
        if self.holdout_rows:
            text += (
                f"; held out: agreement {format_rates(self.holdout_agreement)}, "
                f"{self.holdout_tokens_per_step:.2f} tokens a step with a greedy chain of "
                f"{len(self.holdout_agreement)}"
            )
        return text


def run(config: TrainConfig, report: Reporter) -> TrainResult:
    """Raises EagleError: nothing to learn from, an output made otherwise, or a loss that is not finite."""
    start = time.monotonic()
    features = open_artifact(config.features, "features")
    if artifact_state(config.output) == "complete" and not config.overwrite:
        finished = _open_writer(config, features).finished
        assert finished is not None
        return _result(config.output, finished, seconds=0.0)

    rows = FeatureRows.of(features)
    train_rows, held_out = hold_out(rows.rows, config.holdout, config.seed)
    target_config = json.loads(features.read(f"{TARGET_FOLDER}/config.json"))
    label_counts = rows.label_counts(train_rows, target_config["vocab_size"])
    vocabulary = choose_vocabulary(label_counts, config.draft_vocab_size)
    _report_vocabulary(vocabulary, report)
    plan = plan_training(train_rows, rows.sizes, config.batch_tokens, config.epochs, config.seed)
    total_steps = min(plan.steps, config.max_steps or plan.steps)
    target_parameters = _target_parameters(features)
    training = make_training(config, features, target_config, vocabulary, total_steps)
    with _open_writer(config, features) as writer:
        progress = train(training, rows, plan, held_out, writer, config, report)
        counts = {
            "head": config.head,
            "steps": progress.step,
            "train_rows": len(train_rows),
            "train_tokens": progress.tokens,
            "draft_vocab_size": len(vocabulary.ids),
            "draft_vocab_coverage": round(vocabulary.coverage, 5),
            "parameters": training.head.config.num_parameters,
            "target_parameters": target_parameters,
            "holdout_rows": len(held_out),
            "holdout": progress.holdout,
        }
        write_head(writer, training.head, progress, counts)
        manifest = writer.finish(counts, drop=[CHECKPOINT])
    return _result(config.output, manifest, seconds=time.monotonic() - start)


def make_training(
    config: TrainConfig,
    features: Artifact,
    target_config: dict[str, Any],
    vocabulary: DraftVocabulary,
    total_steps: int,
) -> Training:
    """A fresh head of the target's shape, its weights a function of the seed, ready for the first step."""
    device, dtype = choose_device(config.device), getattr(torch, _dtype_name(config))
    weights = read_target_weights(features)
    torch.manual_seed(config.seed)
    head_config = Eagle3Config.from_target(target_config, len(vocabulary.ids))
    head = Eagle3Head(head_config.model_copy(update={"torch_dtype": _dtype_name(config)}))
    head.set_vocabulary(vocabulary.ids)
    init_from_target(head, weights, output=config.init == "target")
    head.to(device).embed_tokens.to(dtype)  # frozen, so it needs no fp32 copy
    bias = weights.get("lm_head.bias")
    output = TargetOutput(
        weight=weights["lm_head.weight"][vocabulary.ids].to(device, dtype),
        bias=None if bias is None else bias[vocabulary.ids].to(device, dtype),
        scale=logit_scale(SimpleNamespace(**target_config)),
        softcap=target_config.get("final_logit_softcapping"),
    )
    recipe = Recipe(total_steps, config.lr, config.warmup, config.ttt_steps, config.ttt_decay)
    return Training(head, output, recipe, dtype)


def train(
    training: Training,
    rows: FeatureRows,
    plan: TrainingPlan,
    held_out: Sequence[RowIndex],
    writer: ArtifactWriter,
    config: TrainConfig,
    report: Reporter,
) -> Progress:
    """Takes the steps of the plan that come after the last checkpoint, evaluating and saving on the way."""
    progress = load_checkpoint(writer, training.head, training.optimizer) or Progress()
    total_steps = training.recipe.total_steps
    if progress.step:
        report.log(f"training continues after step {progress.step:,} of {total_steps:,}")
    if not held_out:
        report.log(
            "no conversation is held out, so nothing is measured that the head has not seen: see --holdout"
        )
    evaluated = _evaluation_steps(plan, total_steps, config.eval_every) if held_out else set()
    held_batches = split_batches(held_out, HOLDOUT_BATCH_TOKENS) if held_out else ()
    interval, began = Interval(config.ttt_steps), time.monotonic() - progress.seconds
    saves = SaveClock(config.checkpoint_seconds)
    batches = islice(rows.batches(plan.windows, skip=progress.step), total_steps - progress.step)
    with report.task("training", total=plan.tokens(total_steps), unit="tok", done=progress.tokens) as task:
        for batch in batches:
            losses = training.step(batch, progress.step)
            interval.add(losses)
            tokens = int(losses.asked[0])
            progress.step += 1
            progress.tokens += tokens
            task.advance(tokens)
            if progress.step % LOG_EVERY and progress.step not in evaluated and progress.step < total_steps:
                continue
            task.note(f"loss {interval.loss[0]:.3f}, agreement {format_rates(interval.agreement)}")
            progress.log_line(time.monotonic() - began, interval.record())
            interval = Interval(config.ttt_steps)
            if progress.step in evaluated:
                agreement = training.evaluate(rows.batches([held_batches]))
                report.log(f"step {progress.step:,} of {total_steps:,}, held out: agreement {agreement}")
                progress.log_line(time.monotonic() - began, {"holdout": agreement.record()})
            if saves.due():
                with saves:
                    save_checkpoint(writer, training.head, training.optimizer, progress)
    return progress


def write_head(writer: ArtifactWriter, head: Eagle3Head, progress: Progress, counts: dict[str, Any]) -> None:
    """The folder that engines load, and beside it what training measured."""
    for name, data in head_files(head).items():
        writer.add_file(name, data)
    lines = "".join(json.dumps(line) + "\n" for line in progress.log)
    writer.add_file("metrics.jsonl", lines.encode())
    writer.add_file("metrics.json", (json.dumps(counts, indent=2) + "\n").encode())


def _evaluation_steps(plan: TrainingPlan, total_steps: int, every: int | None) -> set[int]:
    steps = plan.epoch_ends if every is None else range(every, total_steps, every)
    return {*steps, total_steps}


def _open_writer(config: TrainConfig, features: Artifact) -> ArtifactWriter:
    return ArtifactWriter.open(
        config.output,
        "head",
        config.model_dump(mode="json", exclude=_NOT_IN_RESULT) | {"dtype": _dtype_name(config)},
        parents=[features.parent()],
        target=features.manifest.target,
        overwrite=config.overwrite,
    )


def _report_vocabulary(vocabulary: DraftVocabulary, report: Reporter) -> None:
    size = len(vocabulary.ids)
    report.log(f"draft vocabulary of {size:,} tokens covers {vocabulary.coverage:.1%} of the answers")
    if vocabulary.coverage < LEAST_COVERAGE:
        report.log(
            f"warning: {1 - vocabulary.coverage:.0%} of the answers' tokens can never be drafted; "
            f"use a --draft-vocab-size above {size}, or 0 (automatic)"
        )


def _target_parameters(features: Artifact) -> int:
    """Counted on a model without storage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(features.local(TARGET_FOLDER))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _dtype_name(config: TrainConfig) -> str:
    return "bfloat16" if config.dtype == "auto" else config.dtype


def _result(output: str, manifest: Manifest, seconds: float) -> TrainResult:
    counts = dict(manifest.counts)
    holdout = counts.pop("holdout")
    assert isinstance(holdout, dict)
    made = {
        "output": output,
        "holdout_agreement": holdout.get("agreement", []),
        "holdout_accepted_per_step": holdout.get("accepted_per_step", 0.0),
        "holdout_tokens_per_step": holdout.get("tokens_per_step", 0.0),
        "seconds": seconds,
    }
    return TrainResult.model_validate(counts | made)
