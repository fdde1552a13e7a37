"""The token ids and loss masks of a conversations artifact, by conversation number, without the texts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from stages.artifacts import Artifact
from stages.errors import EagleError

_COLUMNS = ["input_ids", "loss_mask"]
_AGAIN = "make the conversations again with eagle gen-data"


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One conversation of n tokens."""

    input_ids: np.ndarray  # [n] int32
    loss_mask: np.ndarray  # [n] uint8


class TokenRows:
    """Reads conversations by number, a shard at a time; the last shard stays in memory.

    Numbers count through the shards in the manifest's order, from 0.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self._shards = artifact.manifest.shards
        self._starts = [0, *accumulate(shard.rows for shard in self._shards)]
        self._decoded: tuple[int, list[TokenRow]] | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Iterator[TokenRow]:
        """Conversations `start` to `stop` (not included); reads only the shards that have them.

        Raises:
            EagleError: a shard is damaged or has another schema.
        """
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            first, end = self._starts[number], min(stop, self._starts[number + 1])
            yield from self._shard(number)[start - first : end - first]
            start = end

    def _shard(self, number: int) -> list[TokenRow]:
        if self._decoded is None or self._decoded[0] != number:
            self._decoded = None
            entry = self._shards[number]
            where = f"{self.artifact.uri}/{entry.path}"
            with self.artifact.pinned(entry.path) as path:
                rows = _decode(path, where)
            if len(rows) != entry.rows:
                raise EagleError(f"{where} has {len(rows)} rows and its manifest says {entry.rows}: {_AGAIN}")
            self._decoded = number, rows
        return self._decoded[1]


def _decode(path: Path, where: str) -> list[TokenRow]:
    try:
        table = parquet.read_table(path, columns=_COLUMNS, memory_map=False)
        ids, id_offsets = _flat(table["input_ids"], np.int32)
        mask, mask_offsets = _flat(table["loss_mask"], np.uint8)
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError) as error:
        raise EagleError(f"{where} cannot be read ({' '.join(str(error).split())}): {_AGAIN}") from None
    if not np.array_equal(id_offsets, mask_offsets):
        raise EagleError(f"{where} has ids and loss masks of different lengths: {_AGAIN}")
    if mask.size and mask.max() > 1:
        raise EagleError(f"{where} has a loss mask of other numbers than 0 and 1: {_AGAIN}")
    bounds = id_offsets.tolist()
    return [TokenRow(ids[a:b], mask[a:b]) for a, b in pairwise(bounds)]


def _flat(column: pa.ChunkedArray, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of a column of lists one after the other, and the lists' offsets [rows + 1] in them."""
    lists = column.combine_chunks()
    if lists.null_count or lists.flatten().null_count:
        raise ValueError("a list or a number in it is missing")
    offsets = lists.offsets.to_numpy()
    return lists.flatten().to_numpy().astype(dtype, copy=False), offsets - offsets[0]
