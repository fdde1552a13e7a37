"""Conversations -> features: plan the batches, run the target over them, keep the states that training needs.

Each conversation is cut behind its last label, and conversations of similar length share a forward pass.
Shards are committed one by one; the same command run again continues behind the last, with the same result.
"""

from __future__ import annotations

import shutil
import time

from pydantic import BaseModel

from stages.artifacts.conversations import read_conversations
from stages.artifacts.manifest import Manifest
from stages.artifacts.store import Artifact, ArtifactWriter, open_artifact
from stages.artifacts.uri import local_path
from stages.errors import EagleError
from stages.extract_features.config import ExtractFeaturesConfig
from stages.features.layout import shard_bytes, shard_name
from stages.features.plan import Plan, plan_batches
from stages.features.shards import ShardBuilder
from stages.features.states import target_states, token_batches
from stages.features.target_files import write_target_files
from stages.progress import Reporter
from stages.targets import FeatureTaps, Target, load_target


class ExtractFeaturesResult(BaseModel):
    """What the stage made, or found complete (`seconds` 0)."""

    output: str
    rows: int
    tokens: int
    supervised_tokens: int
    skipped_rows: int
    clipped_rows: int
    shards: int
    bytes: int
    feature_layers: tuple[int, int, int]
    seconds: float

    def summary(self) -> str:
        made = f"in {self.seconds:.1f} s" if self.seconds else "already complete"
        skipped = f", {self.skipped_rows:,} rows without a label skipped" if self.skipped_rows else ""
        clipped = f", {self.clipped_rows:,} cut at the maximum length" if self.clipped_rows else ""
        return (
            f"{self.output}: {self.rows:,} rows, {self.tokens:,} tokens, {self.supervised_tokens:,} "
            f"supervised{skipped}{clipped}; {self.shards} shards, {_megabytes(self.bytes)}, {made}"
        )


def run(config: ExtractFeaturesConfig, report: Reporter) -> ExtractFeaturesResult:
    """Raises EagleError: conversations of another target, nothing to supervise, or not enough disk."""
    start = time.monotonic()
    conversations = open_artifact(config.conversations, "conversations")
    target = load_target(config.target, device=config.device, dtype=config.dtype)
    conversations.require_target(target.fingerprint, "--target", ignore=("dtype",))
    target.model.set_attn_implementation(_attention(target))
    max_length = _max_length(config, target)
    plan = plan_batches(read_conversations(conversations), max_length, config.batch_tokens)
    _check_supervision(plan, conversations)
    settings = {
        "max_length": max_length,
        "batch_tokens": config.batch_tokens,
        "shard_bytes": config.shard_bytes,
        "feature_layers": target.feature_layers,
    }
    _check_space(config.output, plan, target)
    with ArtifactWriter.open(
        config.output,
        "features",
        settings,
        parents=[conversations.parent()],
        target=target.fingerprint,
        overwrite=config.overwrite,
    ) as writer:
        if writer.finished:
            return _result(config.output, writer.finished, seconds=0.0)
        _log_size(plan, target, report)
        write_target_files(writer, target)
        extract(target, conversations, plan, writer, config.shard_bytes, report)
        manifest = writer.finish(_counts(plan))
    return _result(config.output, manifest, seconds=time.monotonic() - start)


def extract(
    target: Target,
    conversations: Artifact,
    plan: Plan,
    writer: ArtifactWriter,
    target_bytes: int,
    report: Reporter,
) -> None:
    """Runs the batches of `plan` that no committed shard has, and commits a shard whenever one is full."""
    done = writer.committed[-1].note["batches"] if writer.committed else 0
    builder = ShardBuilder(target_bytes)
    with (
        FeatureTaps(target.decoder, target.feature_layers) as taps,
        report.task("features", total=plan.tokens, unit="tok", done=plan.tokens_of(done)) as task,
    ):
        for batch in token_batches(read_conversations(conversations), plan, skip=done):
            builder.add(batch, target_states(target, taps, batch))
            done += 1
            task.advance(len(batch.input_ids))
            if builder.full:
                _commit(builder, writer, done)
        if not builder.empty:
            _commit(builder, writer, done)


def _commit(builder: ShardBuilder, writer: ArtifactWriter, batches_done: int) -> None:
    shard = builder.take()
    name = shard_name(len(writer.committed))
    writer.add_shard(name, shard.to_bytes(), rows=len(shard.row_ids), note={"batches": batches_done})


def _max_length(config: ExtractFeaturesConfig, target: Target) -> int:
    if config.max_length and config.max_length > target.max_length:
        raise EagleError(
            f"--max-length {config.max_length} is more than the target's context of {target.max_length}: "
            "leave it out or lower it"
        )
    return config.max_length or target.max_length


def _check_supervision(plan: Plan, conversations: Artifact) -> None:
    if not plan.kept_rows:
        raise EagleError(
            f"none of the {len(plan.rows)} conversations in {conversations.uri} has two response tokens in a "
            "row to learn from: make conversations with longer answers, or raise --max-length"
        )


def _check_space(output: str, plan: Plan, target: Target) -> None:
    """Refuses a local output whose disk has less room than the features need; files already there count."""
    folder = local_path(output)
    if folder is None:
        return
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    needed = _bytes(plan, target) - written
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise EagleError(
            f"{output} needs {_megabytes(needed)} and its disk has {_megabytes(free)} free: make room, "
            "choose another --output, or lower --max-length"
        )


def _log_size(plan: Plan, target: Target, report: Reporter) -> None:
    size = _bytes(plan, target)
    report.log(
        f"{plan.kept_rows:,} rows, {plan.tokens:,} tokens, {plan.supervised:,} supervised: "
        f"{_megabytes(size)} of features at {size / plan.tokens:,.0f} bytes a token"
    )


def _bytes(plan: Plan, target: Target) -> int:
    return shard_bytes(
        plan.kept_rows, plan.tokens, plan.supervised, target.hidden_size, target.dtype.itemsize
    )


def _counts(plan: Plan) -> dict[str, int]:
    return {
        "rows": plan.kept_rows,
        "tokens": plan.tokens,
        "supervised_tokens": plan.supervised,
        "skipped_rows": plan.skipped_rows,
        "clipped_rows": plan.clipped_rows,
    }


def _result(output: str, manifest: Manifest, seconds: float) -> ExtractFeaturesResult:
    made = {
        "output": output,
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "feature_layers": manifest.config["feature_layers"],
        "seconds": seconds,
    }
    return ExtractFeaturesResult.model_validate(manifest.counts | made)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _attention(target: Target) -> str:
    """sdpa, which is fastest; targets that bound their scores need transformers' plain attention to do so."""
    return "eager" if getattr(target.config, "attn_logit_softcapping", None) else "sdpa"
