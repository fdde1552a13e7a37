"""What training expects of its head, written down; and, where the target is at hand, confirmed in serving.

The rows are held out, the weights those that are saved, the maths float32: so what is recorded is what a
correct drafter reaches to 1e-4.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.artifacts import ArtifactWriter, TargetFingerprint
from stages.decoding.parity import (
    RECORD_NAME,
    ExpectedRow,
    ParityRecord,
    ParityReport,
    check_parity,
    digest_of,
)
from stages.errors import EagleError
from stages.features.layout import FeatureRow
from stages.heads import DraftHead
from stages.progress import Reporter
from stages.targets import Target, choose_device, load_target
from stages.targets.chat_template import with_chat_template
from stages.train.batch import collate
from stages.train.unroll import unroll

RECORDED_ROWS = 64
"""Most rows on record; of each a few kilobytes."""

PROBES = 64
QUERIES = 8


def confirm(
    head: DraftHead,
    batches: Iterable[Sequence[FeatureRow]],
    steps: int,
    writer: ArtifactWriter,
    *,
    target: str | None,
    chat_template: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    fingerprint: TargetFingerprint | None = None,
    parameters: int = 0,
    most_rows: int,
    report: Reporter,
) -> ParityReport | None:
    """Adds the record to the head's artifact, and replays some of its rows if there is a target.

    A head that took long to train is not lost for want of a replay: where the target cannot be run here, that
    is said, and no more.

    Args:
        head: as trained.
        batches: held-out rows.
        target: the target's name; None if it is not at hand.
        dtype: number format to decode in.
        fingerprint: of the target that the rows are of, if that is known.
        parameters: of the target, to tell whether there is room for it.
        most_rows: replayed at most; 0 for none.

    Returns:
        What the replay found; None without one.
    """
    rows = [row for batch in batches for row in batch][:RECORDED_ROWS]
    if not rows:
        return None
    served = as_saved(head)
    record = expected(served, rows, steps)
    writer.add_file(RECORD_NAME, record.to_bytes())
    if target is None or most_rows == 0:
        return None

    def load(number_format: str) -> Target:
        _require_room(parameters, device, number_format)
        return with_chat_template(load_target(target, device, number_format), chat_template)

    try:
        loaded = load(dtype)
        _require_same(loaded, fingerprint)
        found = check_parity(
            loaded,
            served.to(loaded.device),
            record,
            rows[:most_rows],
            float32_target=partial(load, "float32"),
            report=report,
        )
    except (EagleError, torch.OutOfMemoryError) as error:
        reason = " ".join(str(error).split())[:300]
        report.log(f"what training predicts is not confirmed by decoding with {target}: {reason}")
        return None
    for warning in found.warnings:
        report.log(f"warning: {warning}")
    return found


def _require_same(target: Target, fingerprint: TargetFingerprint | None) -> None:
    """Raises EagleError: the features are another target's."""
    other = [] if fingerprint is None else target.fingerprint.mismatch(fingerprint)
    if differing := [part for part in other if part != "dtype"]:
        raise EagleError(f"it is not the features' target, its {', '.join(differing)} differ")


def _require_room(parameters: int, device: str, number_format: str) -> None:
    """Raises EagleError: the target would not fit into memory beside the training."""
    free = free_bytes(choose_device(device))
    needed = parameters * (4 if number_format == "float32" else 2)
    if needed > free:
        raise EagleError(
            f"it needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free; use eagle bench --parity"
        )


def free_bytes(device: torch.device) -> int:
    """Of the memory that a target on this device would be loaded to."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    if info.exists():
        available = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_parity(found: Any, head: str, result: Any) -> None:
    """Raises EagleError, with `result`: a finished head's counts say, in `found`, that it failed."""
    if found:
        fields = ParityReport.model_fields
        report = ParityReport.model_validate({name: found[name] for name in fields if name in found})
        report.require(head, result)


def as_saved(head: DraftHead) -> DraftHead:
    """A float32 copy with the weights that the head's file has, ready to draft."""
    saved = copy.deepcopy(head).to(getattr(torch, head.config.torch_dtype))
    return saved.float().eval().requires_grad_(False)


@torch.no_grad()
def expected(head: DraftHead, rows: Sequence[FeatureRow], steps: int) -> ParityRecord:
    """What the training-time unroll of a float32 head makes of the rows, one at a time."""
    size = head.config.draft_vocab_size
    probes = (torch.arange(min(PROBES, size)) * size) // min(PROBES, size)
    return ParityRecord(steps, probes, tuple(_expected_row(head, row, steps, probes) for row in rows))


def _expected_row(head: DraftHead, row: FeatureRow, steps: int, probes: Tensor) -> ExpectedRow:
    device = head.draft_ids.device
    batch = collate([row], steps).to(device, torch.float32)
    unrolled = unroll(head, batch, steps)
    drafted = torch.stack([(states @ unrolled.weight.T).argmax(-1) for states in unrolled.states])  # [S, s]
    label = batch.step_tokens.roll(-1, 0)  # [S, s]: step i is asked for what step i+1 is fed
    ids, positions = row.input_ids.long(), row.supervised
    label[-1] = ids[(positions + steps).clamp(max=len(ids) - 1)].to(device)
    right = (head.draft_ids[drafted] == label) & batch.counted
    lengths = right.long().cumprod(0).sum(0).to(torch.uint8).cpu()
    # Where drafts are right, later steps are compared too: a drafter is fed its own drafts.
    queries = lengths.sort(descending=True, stable=True).indices[:QUERIES]
    logits = unrolled.states[:, queries] @ unrolled.weight[probes].T  # [S, n, K]
    logits = logits.masked_fill(~batch.counted[:, queries, None], torch.nan)
    return ExpectedRow(
        row.row_id, len(ids), digest_of(ids), lengths, queries.cpu(), logits.transpose(0, 1).cpu()
    )
