"""What training expects of a head on held-out rows: how far its drafts go, and some of its logits.

`draft/parity.safetensors` in the head's artifact holds numbers and positions only, none of the rows' text: a
head may go where the conversations may not. Engines take what lies beside `config.json` for weights, and do
not look into `draft`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from stages.errors import EagleError

if TYPE_CHECKING:
    from stages.artifacts import Artifact

RECORD_NAME = "draft/parity.safetensors"
_KEY = "parity"
_NAMES = ("row_id", "tokens", "digest")
_TENSORS = ("lengths", "queries", "logits")


@dataclass(frozen=True)
class ExpectedRow:
    """One row. S draft steps, s supervised positions p of the row, of which n have logits on record.

    Attributes:
        row_id: of the conversation.
        tokens: of the row, from the start of the conversation.
        digest: of the row's tokens, see `digest_of`.
        lengths: uint8 [s], how many tokens of a greedy chain of S drafted behind x_p are the row's own.
        queries: int64 [n], indices into the supervised positions.
        logits: fp32 [n, S, K], of the record's probe ids, with the row's own tokens fed; NaN where the turn
            has ended.
    """

    row_id: int
    tokens: int
    digest: str
    lengths: Tensor
    queries: Tensor
    logits: Tensor


@dataclass(frozen=True)
class ParityRecord:
    """The rows, the number S of draft steps, and the draft ids int64 [K] whose logits are on record."""

    steps: int
    probes: Tensor
    rows: tuple[ExpectedRow, ...]

    def to_bytes(self) -> bytes:
        tensors = {"probes": self.probes}
        for number, row in enumerate(self.rows):
            tensors |= {f"{name}.{number}": getattr(row, name) for name in _TENSORS}
        names = [{name: getattr(row, name) for name in _NAMES} for row in self.rows]
        metadata = {_KEY: json.dumps({"steps": self.steps, "rows": names})}
        return safetensors.torch.save(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata
        )

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> ParityRecord:
        """Raises EagleError: `data`, the file called `name`, is no such record."""
        try:
            tensors = safetensors.torch.load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            described = json.loads(header["__metadata__"][_KEY])
            rows = tuple(
                ExpectedRow(
                    **{name: row[name] for name in _NAMES},
                    lengths=tensors[f"lengths.{number}"],
                    queries=tensors[f"queries.{number}"],
                    logits=tensors[f"logits.{number}"],
                )
                for number, row in enumerate(described["rows"])
            )
            return cls(described["steps"], tensors["probes"], rows)
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise EagleError(
                f"{name} is no record of what training expects ({type(error).__name__}: {error}): train the "
                "head again"
            ) from None

    @classmethod
    def of(cls, artifact: Artifact) -> ParityRecord:
        """The record in a head's artifact.

        Raises:
            EagleError: there is none.
        """
        if not any(file.path == RECORD_NAME for file in artifact.manifest.files):
            raise EagleError(
                f"{artifact.uri} has no {RECORD_NAME}, so nothing is known of what its training expects: "
                "only heads of eagle train with held-out conversations (--holdout) have one"
            )
        return cls.from_bytes(artifact.read(RECORD_NAME), f"{artifact.uri}/{RECORD_NAME}")


def digest_of(input_ids: Tensor | Sequence[int]) -> str:
    """Tells rows of the same tokens: a few hex digits of their sha256."""
    ids = torch.as_tensor(input_ids).to(torch.int32).cpu()
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:24]
