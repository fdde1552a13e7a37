"""Some rows of a shard of features without the rest of the file: its tables whole, their own states only."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stages.errors import EagleError
from stages.features.layout import FeatureShard, supervised_positions

if TYPE_CHECKING:
    from stages.artifacts import Artifact, Shard

_HEADER_BYTES = 4096
"""Read at first; a header of features has about 800."""

_DTYPES = {
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
_OF_TOKENS = ("input_ids", "loss_mask", "aux", "aux_scale")
_OF_SUPERVISED = ("last", "last_scale", "target_argmax")


class ShardRanges:
    """A shard that is read by ranges, remote or not. What is read is not compared with a digest.

    Attributes:
        row_ids: int64 [R].
    """

    def __init__(self, artifact: Artifact, shard: Shard) -> None:
        """Raises EagleError: it is not a feature shard, or cannot be read."""
        self._artifact = artifact
        self._shard = shard
        try:
            self._header, self._begin = self._read_header()
            self.row_ids, self._offsets = self._tensor("row_ids"), self._tensor("row_offsets")
            self._positions = supervised_positions(self._tensor("loss_mask"), self._offsets)
        except (IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise self._odd(error) from error

    def rows(self, begin: int, end: int) -> FeatureShard:
        """Rows `begin` to `end` (not included) as a shard of their own; at least one.

        Raises:
            EagleError: it is not a feature shard, or cannot be read.
        """
        try:
            first, last = int(self._offsets[begin]), int(self._offsets[end])
            bounds = torch.searchsorted(self._positions, torch.tensor([first, last])).tolist()
            tensors = {name: self._tensor(name, first, last) for name in _OF_TOKENS if name in self._header}
            tensors |= {name: self._tensor(name, *bounds) for name in _OF_SUPERVISED if name in self._header}
            tensors["row_ids"] = self.row_ids[begin:end]
            tensors["row_offsets"] = self._offsets[begin : end + 1] - first
            return FeatureShard(**tensors)
        except (IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise self._odd(error) from error

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """What safetensors says of the tensors, and where they begin in the file."""
        head = self._read(0, min(_HEADER_BYTES, self._shard.bytes))
        begin = 8 + int.from_bytes(head[:8], "little")  # a header of JSON, its length before it
        if begin > self._shard.bytes:
            raise ValueError("its header is longer than the file")
        if begin > len(head):
            head += self._read(len(head), begin)
        header: dict[str, Any] = json.loads(head[8:begin])
        return header, begin

    def _tensor(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Entries `first` to `last` of a tensor along its first dimension; all by default."""
        entry = self._header[name]
        dtype, (count, *shape) = _DTYPES[entry["dtype"]], entry["shape"]
        last = count if last is None else last
        each = math.prod(shape) * dtype.itemsize
        start = self._begin + entry["data_offsets"][0]
        data = bytearray(self._read(start + first * each, start + last * each))
        if not data:
            return torch.empty((0, *shape), dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(last - first, *shape)

    def _read(self, start: int, stop: int) -> bytes:
        return self._artifact.read_range(self._shard.path, start, stop)

    def _odd(self, error: Exception) -> EagleError:
        where = f"{self._artifact.uri}/{self._shard.path}"
        return EagleError(f"{where} is not a feature shard ({error}): run eagle extract-features again")
