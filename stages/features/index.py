"""What a shard of features holds, without its states: enough to choose and to order what to learn from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stages.errors import EagleError
from stages.features.layout import supervised_positions

if TYPE_CHECKING:
    from stages.artifacts import Artifact

_HEADER_BYTES = 4096
"""Read at first; a header of features has about 800."""

_DTYPES = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8}


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Where a row is, and how much it teaches."""

    shard: int
    row: int  # in the shard
    row_id: int  # of the conversation
    tokens: int
    supervised: int  # positions


@dataclass(frozen=True)
class ShardIndex:
    """One shard. Rows with nothing supervised are not in `rows`."""

    rows: tuple[RowIndex, ...]
    labels: Tensor  # [S] int32: the token after each supervised position, in the order of the rows
    bytes: int  # of the file

    @classmethod
    def of(
        cls,
        number: int,
        input_ids: Tensor,
        loss_mask: Tensor,
        row_offsets: Tensor,
        row_ids: Tensor,
        size: int,
    ) -> ShardIndex:
        """Of the tensors of shard `number`; `stages.features.layout` says what each is. `size` in bytes."""
        positions = supervised_positions(loss_mask, row_offsets)
        supervised = torch.searchsorted(positions, row_offsets).diff().tolist()
        tokens = row_offsets.diff().tolist()
        rows = tuple(
            RowIndex(number, row, row_id, tokens[row], supervised[row])
            for row, row_id in enumerate(row_ids.tolist())
            if supervised[row]
        )
        return cls(rows, input_ids[positions + 1], size)

    def label_counts(self, rows: Iterable[RowIndex], vocab_size: int) -> Tensor:
        """int64 [V]: how often each token is a label of these rows of the shard."""
        chosen = {row.row for row in rows}
        taken = torch.tensor([row.row in chosen for row in self.rows], dtype=torch.bool)
        lengths = torch.tensor([row.supervised for row in self.rows])
        labels = self.labels[taken.repeat_interleave(lengths)]
        return torch.bincount(labels.long(), minlength=vocab_size)


def label_counts(shards: tuple[ShardIndex, ...], rows: Iterable[RowIndex], vocab_size: int) -> Tensor:
    """int64 [V]: how often each token is the label of a supervised position of these rows."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for number, members in groupby(rows, lambda row: row.shard):
        counts += shards[number].label_counts(members, vocab_size)
    return counts


def read_index(artifact: Artifact, number: int) -> ShardIndex:
    """Reads a few hundred kilobytes of shard `number`, not its states. They are not compared with a digest.

    Raises:
        EagleError: it is not a feature shard, or cannot be read.
    """
    shard = artifact.manifest.shards[number]

    def read(start: int, stop: int) -> bytes:
        return artifact.read_range(shard.path, start, stop)

    try:
        head = read(0, min(_HEADER_BYTES, shard.bytes))
        begin = 8 + int.from_bytes(head[:8], "little")  # a header of JSON, its length before it; then tensors
        if begin > shard.bytes:
            raise ValueError("its header is longer than the file")
        if begin > len(head):
            head += read(len(head), begin)
        header: dict[str, Any] = json.loads(head[8:begin])
        tensors = {}
        for name in ("input_ids", "loss_mask", "row_offsets", "row_ids"):
            entry = header[name]
            start, stop = entry["data_offsets"]
            data = bytearray(read(begin + start, begin + stop))
            tensors[name] = torch.frombuffer(data, dtype=_DTYPES[entry["dtype"]]).view(entry["shape"])
        return ShardIndex.of(number, **tensors, size=shard.bytes)
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise EagleError(
            f"{artifact.uri}/{shard.path} is not a feature shard ({error}): run eagle extract-features again"
        ) from error
