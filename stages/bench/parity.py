"""`eagle bench --parity`: the held-out conversations of a head's training, replayed as they are served."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from pydantic import BaseModel

from stages.artifacts import Artifact, ArtifactWriter, join, open_artifact
from stages.bench.config import BenchConfig
from stages.bench.report import REPORT_NAME
from stages.decoding.parity import ParityRecord, ParityReport, check_parity
from stages.errors import EagleError
from stages.features.joined import offline_features
from stages.features.layout import FeatureRow
from stages.features.token_rows import TokenRow, TokenRows
from stages.heads import load_head
from stages.progress import Reporter
from stages.targets import Target, load_target
from stages.targets.chat_template import with_chat_template


class ParityResult(BaseModel):
    """The comparison, and where it was written (`seconds` 0: it was there already)."""

    output: str
    report: str
    parity: ParityReport
    seconds: float

    def summary(self) -> str:
        made = f"made in {self.seconds:.0f} s" if self.seconds else "already complete"
        return "\n".join([*self.parity.lines(), f"Report: {self.report} ({made})"])


def run(config: BenchConfig, report: Reporter) -> ParityResult:
    """Raises EagleError: inputs that do not fit, or, after the report, a head that drafts otherwise."""
    start = time.monotonic()
    artifact = open_artifact(config.head[0], "head", config.verify)
    record = ParityRecord.of(artifact)
    data = _training_data(artifact, config)
    target = _load(config, config.dtype)
    artifact.require_target(target.fingerprint, "the target", ignore=("dtype",))
    dtype = str(target.dtype).removeprefix("torch.")
    with ArtifactWriter.open(
        config.output,
        "report",
        {"parity": True, "dtype": dtype, "device": target.device.type, "rows": config.parity_rows},
        parents=[artifact.parent(), *(part.parent() for part in data)],
        target=target.fingerprint,
        overwrite=config.overwrite,
    ) as writer:
        if writer.finished:
            text = open_artifact(config.output, "report", config.verify).read(REPORT_NAME)
            return _result(config, ParityReport.model_validate(json.loads(text)["parity"]), seconds=0.0)
        head = load_head(artifact, dtype=torch.float32, device=target.device)
        found = check_parity(
            target,
            head,
            record,
            _rows(data, record, config.parity_rows),
            float32_target=lambda: _load(config, "float32"),
            report=report,
        )
        writer.add_file(REPORT_NAME, json.dumps({"parity": found.model_dump()}, indent=2).encode() + b"\n")
        writer.finish({"parity": found.record()})
    return _result(config, found, seconds=time.monotonic() - start)


def _result(config: BenchConfig, found: ParityReport, seconds: float) -> ParityResult:
    result = ParityResult(
        output=config.output, report=join(config.output, REPORT_NAME), parity=found, seconds=seconds
    )
    found.require(config.head[0], result)
    return result


def _load(config: BenchConfig, dtype: str) -> Target:
    return with_chat_template(load_target(config.target, config.device, dtype), config.chat_template)


def _training_data(head: Artifact, config: BenchConfig) -> list[Artifact]:
    """The features that the head was trained on, or the conversations where they were taken on the fly.

    Raises:
        EagleError: they are not where they were, or are others.
    """
    parents = [parent for parent in head.manifest.parents if parent.kind in ("features", "conversations")]
    if config.trained_on and len(config.trained_on) != len(parents):
        raise EagleError(
            f"{head.uri} was trained on {len(parents)} artifacts and --trained-on names "
            f"{len(config.trained_on)}: give each, in the order of its training"
        )
    data = []
    for parent, uri in zip_longest(parents, config.trained_on):
        try:
            data.append(open_artifact(uri or parent.uri, parent.kind, config.verify))
        except EagleError as error:
            if uri is not None:
                raise
            raise EagleError(
                f"{error}; {head.uri} was trained on it: say where it is with --trained-on"
            ) from None
        if data[-1].manifest.digest != parent.digest:
            raise EagleError(
                f"{data[-1].uri} are not the {parent.kind} that {head.uri} was trained on: give those as "
                "--trained-on"
            )
    return data


def _rows(data: Sequence[Artifact], record: ParityRecord, most: int) -> Iterator[FeatureRow]:
    if data[0].manifest.kind == "conversations":
        conversations = TokenRows(data[0])
        for row in record.rows[:most]:
            (whole,) = conversations.read(row.row_id, row.row_id + 1)
            yield _without_states(row.row_id, whole, row.tokens)
        return
    source = offline_features(data)
    wanted = {row.row_id for row in record.rows}
    found = [row for shard in source.shards for row in shard.rows if row.row_id in wanted][:most]
    for number in dict.fromkeys(row.shard for row in found):
        with source.open(number) as rows:
            for index in found:
                if index.shard == number:
                    yield rows[index.row]


def _without_states(row_id: int, row: TokenRow, tokens: int) -> FeatureRow:
    none = torch.empty(0, 0)
    return FeatureRow(
        row_id,
        torch.tensor(row.input_ids[:tokens], dtype=torch.int32),
        torch.tensor(row.loss_mask[:tokens], dtype=torch.uint8),
        stored_aux=none,
        stored_last=none,
        target_argmax=torch.empty(0, dtype=torch.int32),
    )
