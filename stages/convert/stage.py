"""What another tool made -> an artifact: tell what it is, then convert hidden states to features, or a head.

Hidden states go one sample file at a time into shards, which are committed one by one; the same command run
again continues behind the last, with the same result.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any, Literal

import torch
from pydantic import BaseModel

from stages.artifacts import ArtifactWriter, Manifest
from stages.config import several
from stages.convert.config import ConvertConfig
from stages.convert.features import Finisher, ShardParts, write_shards
from stages.convert.formats import Kind, SampleFile, recognise, sample_files
from stages.convert.head import NAMES, architectures, read_artifact, read_head
from stages.convert.masks import STATE, LossMasks, data_files, find_dataset
from stages.convert.samples import default_layers, first_dtype, last_is_normed, read_samples
from stages.convert.source import Source, open_source
from stages.convert.tally import Tally
from stages.errors import EagleError
from stages.features.config import parse_layers
from stages.features.storage import StorageFormat
from stages.features.target_files import write_target_files
from stages.heads import head_files, speculators_files
from stages.progress import Reporter
from stages.targets.ends import load_target_ends
from stages.targets.taps import check_feature_layers

LEAST_AGREEMENT = 0.1
"""Share of labels that the target itself would choose; it is far higher wherever the states belong to it."""

_SOURCES: dict[Kind, str] = {
    "speculators": "hidden states of speculators",
    "speculators-pickles": "hidden states of speculators up to 0.4",
    "specforge": "hidden states of SpecForge",
    "head": "a draft head",
    "artifact": "a head of eagle's own",
}


class ConvertResult(BaseModel):
    """What the stage made, or found complete (`seconds` 0)."""

    output: str
    kind: Literal["features", "head"]
    source: str
    counts: dict[str, Any]
    bytes: int
    seconds: float

    def summary(self) -> str:
        made = f"in {self.seconds:.1f} s" if self.seconds else "already complete"
        count = self.counts
        if self.kind == "head":
            return (
                f"{self.output}: {NAMES[count['head']]} of {count['parameters'] / 1e6:.1f} M parameters, "
                f"{count['draft_vocab_size']:,} draft tokens, {self.bytes / 1e6:,.1f} MB, {made}"
            )
        skipped = f", {several(count['skipped_rows'], 'file')} skipped" if count["skipped_rows"] else ""
        return (
            f"{self.output}: {several(count['rows'], 'row')}, {several(count['tokens'], 'token')}, "
            f"{count['supervised_tokens']:,} supervised{skipped}; {self.bytes / 1e6:,.1f} MB, {made}"
        )


def run(config: ConvertConfig, report: Reporter) -> ConvertResult:
    """Raises EagleError: a source of no known kind or with too many bad files, or one that does not fit."""
    start = time.monotonic()
    source = open_source(config.source)
    kind = recognise(source, config.format, config.to)
    report.log(f"{config.source}: {_SOURCES[kind]}")
    is_head = kind in ("head", "artifact")
    if config.to != "eagle" and not is_head:
        raise EagleError(
            f"{config.source} holds {_SOURCES[kind]}, and --to {config.to} is for heads: leave it out"
        )
    convert = convert_head if is_head else convert_features
    manifest, made = convert(config, source, kind, report)
    return ConvertResult(
        output=config.output,
        kind="head" if is_head else "features",
        source=config.source,
        counts=manifest.counts,
        bytes=sum(entry.bytes for entry in (*manifest.shards, *manifest.files)),
        seconds=time.monotonic() - start if made else 0.0,
    )


def convert_features(
    config: ConvertConfig, source: Source, kind: Kind, report: Reporter
) -> tuple[Manifest, bool]:
    """The artifact, and whether this run made it."""
    if config.target is None:
        raise EagleError(f"{config.source} does not say which target its states are of: give --target")
    files = sample_files(source, kind)
    dataset = find_dataset(source, config.dataset) if kind == "speculators" else None
    stored = first_dtype(source, kind, files)
    dtype = stored if config.dtype == "auto" else getattr(torch, config.dtype)
    target = load_target_ends(config.target, config.device, dtype)
    depth, max_length = target.config.num_hidden_layers, config.max_length or target.max_length
    layers = (
        check_feature_layers(parse_layers(config.layers), depth)
        if config.layers
        else default_layers(source, kind, depth)
    )
    storage = StorageFormat.of(config.storage_dtype, target.dtype)
    normed = last_is_normed(kind) if config.last_state == "auto" else config.last_state == "after-norm"
    settings = {
        "format": kind,
        "source_digest": source.digest(
            [file.name for file in files], telling=[files[0].name, files[-1].name]
        ),
        "dataset_digest": dataset.digest(data_files(dataset), telling=[STATE]) if dataset else None,
        "feature_layers": layers,
        "last_state": "after-norm" if normed else "before-norm",
        "storage_dtype": storage.name,
        "max_length": max_length,
        "long_rows": config.long_rows,
        "shard_bytes": config.shard_bytes,
    }
    if config.last == "all":
        settings["last"] = config.last
    with ArtifactWriter.open(
        config.output, "features", settings, target=target.fingerprint, overwrite=config.overwrite
    ) as writer:
        if writer.finished:
            return writer.finished, False
        write_target_files(writer, target)
        finisher = Finisher(
            target,
            storage,
            normed=normed,
            max_length=max_length,
            long_rows=config.long_rows,
            source=config.source,
            every_last=config.last == "all",
        )
        parts = ShardParts(target.hidden_size, storage, config.last == "all")
        masks = LossMasks(dataset) if dataset else None
        tally = pack(config, source, kind, files, masks, finisher, parts, writer, report)
        _report_oddities(tally, config, report)
        return writer.finish(_counts(tally, config.source)), True


def pack(
    config: ConvertConfig,
    source: Source,
    kind: Kind,
    files: list[SampleFile],
    masks: LossMasks | None,
    finisher: Finisher,
    parts: ShardParts,
    writer: ArtifactWriter,
    report: Reporter,
) -> Tally:
    """Converts the files that come after those of the last committed shard."""
    tally = Tally(**writer.committed[-1].note) if writer.committed else Tally()
    samples = read_samples(source, kind, files[tally.files :], masks)
    with report.task("files", total=len(files), unit="files", done=tally.files) as task:
        for _ in write_shards(samples, finisher, parts, writer, tally, config.shard_bytes):
            task.advance()
            tally.check(config.source, len(files), config.max_reject_rate)
    if not tally.rows:
        raise EagleError(
            f"none of the {several(len(files), 'file')} in {config.source} can be used: {tally.reasons()}: "
            "check --target and the loss masks"
        )
    return tally


def convert_head(
    config: ConvertConfig, source: Source, kind: Kind, report: Reporter
) -> tuple[Manifest, bool]:
    """The artifact, and whether this run made it."""
    head = read_artifact(config) if kind == "artifact" else read_head(source, config, report)
    if config.to == "speculators":
        target = config.target or head.fingerprint.name
        files = speculators_files(head.module, target, architectures(target))
    else:
        files = head_files(head.module)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    settings = {"format": kind, "digests": digests}
    with ArtifactWriter.open(
        config.output, "head", settings, target=head.fingerprint, overwrite=config.overwrite
    ) as writer:
        if writer.finished:
            return writer.finished, False
        for name, data in files.items():
            writer.add_file(name, data)
        counts = {
            "head": head.module.kind,
            "source": config.source,
            "parameters": head.module.config.num_parameters,
            "draft_vocab_size": head.module.config.draft_vocab_size,
        }
        return writer.finish(counts), True


def _report_oddities(tally: Tally, config: ConvertConfig, report: Reporter) -> None:
    if tally.skipped:
        report.log(f"{tally.skipped:,} of {several(tally.files, 'file')} skipped: {tally.reasons()}")
    if tally.unmasked:
        report.log(
            f"{several(tally.unmasked, 'token')} behind an end of turn "
            f"{'is' if tally.unmasked == 1 else 'are'} marked as the target's own in "
            f"{config.source}, which they cannot be: not supervised"
        )
    report.log(f"{config.target} itself would choose {tally.agreement:.0%} of the labels")
    if tally.agreement < LEAST_AGREEMENT:
        report.log(
            "warning: so few agree that the last states are hardly those of this target, or not where they "
            "should be: check --target and --last-state"
        )


def _counts(tally: Tally, source: str) -> dict[str, Any]:
    return {
        "rows": tally.rows,
        "tokens": tally.tokens,
        "supervised_tokens": tally.supervised,
        "skipped_rows": tally.skipped,
        "clipped_rows": tally.clipped,
        "dropped_rows": tally.dropped,
        "unmasked_tokens": tally.unmasked,
        "agreement": round(tally.agreement, 4),
        "rejected": tally.rejected,
        "source": source,
    }
