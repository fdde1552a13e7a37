"""Conversations -> features: plan the batches, run the target over them, keep the states that training needs.

Each conversation ends behind its last label, and conversations of similar length share a forward pass. Shards
are committed one by one; the same command run again continues behind the last, with the same result.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from pydantic import BaseModel

from stages.artifacts import (
    Artifact,
    ArtifactWriter,
    Manifest,
    artifact_state,
    free_bytes,
    join,
    merge_parts,
    open_artifact,
    part_name,
)
from stages.artifacts.counts import add_counts
from stages.artifacts.uri import local_path
from stages.config import several
from stages.errors import EagleError
from stages.extract_features.config import ExtractFeaturesConfig
from stages.extract_features.estimate import FeaturesEstimate, estimate, gigabytes
from stages.features.config import FeatureSettings
from stages.features.engine import StatesEngine, TransformersStates
from stages.features.extraction import Extraction, plan_extraction
from stages.features.layout import shard_name
from stages.features.target_files import target_files
from stages.progress import Reporter
from stages.targets import Target, load_target
from stages.targets.chat_template import with_chat_template
from stages.targets.ends import load_target_ends


class ExtractFeaturesResult(BaseModel):
    """What the stage made, or found complete (`seconds` 0)."""

    output: str
    rows: int
    tokens: int
    supervised_tokens: int
    clipped_rows: int
    dropped_rows: int
    skipped_rows: int
    left_out_rows: int
    shards: int
    bytes: int
    feature_layers: tuple[int, int, int]
    storage_dtype: str
    seconds: float

    def summary(self) -> str:
        made = f"in {self.seconds:.1f} s" if self.seconds else "already complete"
        others = {
            "cut at the maximum length": self.clipped_rows,
            "dropped as too long": self.dropped_rows,
            "without a label skipped": self.skipped_rows,
            "left out": self.left_out_rows,
        }
        counted = "".join(f", {count:,} {name}" for name, count in others.items() if count)
        return (
            f"{self.output}: {several(self.rows, 'row')}, {several(self.tokens, 'token')}, "
            f"{self.supervised_tokens:,} supervised{counted}; {several(self.shards, 'shard')}, "
            f"{gigabytes(self.bytes)} in {self.storage_dtype}, "
            f"{made}"
        )


def run(config: ExtractFeaturesConfig, report: Reporter) -> ExtractFeaturesResult | FeaturesEstimate:
    """Raises EagleError: conversations of another target, nothing to supervise, or not enough disk."""
    start = time.monotonic()
    conversations = open_artifact(config.conversations, "conversations", config.verify)
    if config.joins is not None and not config.estimate:
        return _result(config, join_parts(config, conversations, config.joins), time.monotonic() - start)
    target = _load(config)
    extraction = plan_extraction(config, target, conversations, config.part)
    files = target_files(target) if config.part is None or config.shard_index == 0 else {}
    file_bytes = sum(map(len, files.values()))
    if config.estimate:
        free = None if config.output is None else free_bytes(config.output)
        return estimate(
            extraction,
            engine=_engine(config, extraction),
            output=config.output,
            free=free,
            target_bytes=file_bytes,
            report=report,
        )
    _check_space(_place(config), extraction, file_bytes)
    with ArtifactWriter.open(
        _output(config),
        "features",
        extraction.settings | {"engine": config.engine},
        parents=[conversations.parent()],
        target=target.fingerprint,
        overwrite=config.overwrite,
        part=config.part,
    ) as writer:
        if writer.finished:
            return _result(config, writer.finished, seconds=0.0)
        _log_size(extraction, report)
        for name, data in files.items():
            writer.add_file(name, data)
        write_shards(extraction, lambda: _engine(config, extraction), writer, report)
        manifest = writer.finish(extraction.plan.counts())
    return _result(config, manifest, seconds=time.monotonic() - start)


def write_shards(
    extraction: Extraction, engine: Callable[[], StatesEngine], writer: ArtifactWriter, report: Reporter
) -> None:
    """Makes the shards that are not committed yet; each is written while the next one is made.

    Args:
        engine: starts what runs the target.
    """
    plan, first = extraction.plan, len(writer.committed)
    done = sum(sizes.tokens for sizes in extraction.sizes[:first])
    if first == len(extraction.shards):
        return
    with (
        extraction.running(engine()) as target,  # first: an engine may take minutes to start
        report.task("features", total=plan.tokens, unit="tok", done=done) as task,
    ):
        for number in range(first, len(extraction.shards)):
            shard = target.shard(number, task.advance)
            writer.add_shard(shard_name(number), shard.to_bytes(), rows=len(shard.row_ids), wait=False)
        writer.flush()


def _load(config: ExtractFeaturesConfig) -> Target:
    if config.engine == "transformers":
        target = load_target(
            config.target, config.device, config.dtype, decodes=False, device_map=config.device_map
        )
    else:
        dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
        target = load_target_ends(config.target, "cpu", dtype)
    return with_chat_template(target, config.chat_template)


def _engine(config: ExtractFeaturesConfig, extraction: Extraction) -> StatesEngine:
    if config.engine == "transformers":
        return TransformersStates(
            extraction.target, extraction.layers, extraction.storage, extraction.every_last
        )
    from stages.features.vllm_states import VllmStates

    return VllmStates(
        extraction.target,
        extraction.layers,
        extraction.storage,
        every_last=extraction.every_last,
        max_length=max(row.length for row in extraction.plan.rows),
        forward_tokens=config.forward_tokens,
        tensor_parallel_size=config.tensor_parallel_size,
    )


def join_parts(config: ExtractFeaturesConfig, conversations: Artifact, number: int) -> Manifest:
    """Makes one artifact of the parts of a job array, or finds it made. Needs no target.

    Raises:
        EagleError: a part is missing, or parts were made with other settings or from other conversations.
    """
    output = _output(config)
    parts = (join(output, part_name(part, number)) for part in range(number))
    made = next((uri for uri in (output, *parts) if artifact_state(uri) == "complete"), None)
    if made is None:
        raise EagleError(
            f"none of the {several(number, 'part')} of {output} is finished: run each with --shard-index, "
            f"from 0 to {number - 1}"
        )
    first = open_artifact(made, "features", "off").manifest
    _refuse_other_flags(config, first)
    return merge_parts(
        output, "features", first.config, [conversations.parent()], first.target, number, _added_counts
    )


def _added_counts(parts: list[dict[str, object]]) -> dict[str, object]:
    counts = add_counts(parts)
    if not counts["rows"]:
        raise EagleError("no conversation of any part has two response tokens in a row to learn from")
    return counts


def _refuse_other_flags(config: ExtractFeaturesConfig, part: Manifest) -> None:
    """Flags that are given and not what the parts were made with; those left at their default say nothing."""
    layers = ",".join(map(str, part.config["feature_layers"]))
    made_with = {"last": "supervised"} | part.config | {"layers": layers}  # `last` is named if it is another
    for name, field in FeatureSettings.model_fields.items():
        given, used = getattr(config, name), made_with[name]
        if given not in (field.default, used):
            raise EagleError(
                f"the parts of {config.output} were made with --{name.replace('_', '-')} {used}, not "
                f"{given}: give the same flags to all parts and to what joins them"
            )


def _output(config: ExtractFeaturesConfig) -> str:
    assert config.output is not None  # the configuration has seen to it
    return config.output


def _place(config: ExtractFeaturesConfig) -> str:
    """Where this process writes."""
    output = _output(config)
    return output if config.part is None else join(output, part_name(*config.part))


def _check_space(place: str, extraction: Extraction, file_bytes: int) -> None:
    """Refuses a local output whose disk has less room than the features need; files already there count."""
    free, folder = free_bytes(place), local_path(place)
    if free is None or folder is None:
        return
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    needed = extraction.bytes + file_bytes - written
    if needed > free:
        raise EagleError(
            f"{place} needs {gigabytes(needed)} and its disk has {gigabytes(free)} free: make room, choose "
            "another --output or --storage-dtype fp8, or lower --max-tokens"
        )


def _log_size(extraction: Extraction, report: Reporter) -> None:
    plan, size = extraction.plan, extraction.bytes
    report.log(
        f"{several(plan.kept_rows, 'row')}, {several(plan.tokens, 'token')}, {plan.supervised:,} supervised: "
        f"{gigabytes(size)} of features in {extraction.storage.name}, "
        f"{size / max(plan.tokens, 1):,.0f} bytes a token"
    )


def _result(config: ExtractFeaturesConfig, manifest: Manifest, seconds: float) -> ExtractFeaturesResult:
    made = {
        "output": _place(config),
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "feature_layers": manifest.config["feature_layers"],
        "storage_dtype": manifest.config["storage_dtype"],
        "seconds": seconds,
    }
    return ExtractFeaturesResult.model_validate(manifest.counts | made)
