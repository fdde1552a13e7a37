"""The `conversations` schema: what users asked, what the target answered, and the token ids of both.

One row is one sequence of tokens. `input_ids` are exactly those that the target saw and sampled, never a
second tokenisation of the text, so `loss_mask` is exact by construction: 1 where the target chose the token
itself (the end of its turn included), 0 for everything that was given to it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from pyarrow import parquet

from stages.errors import EagleError

if TYPE_CHECKING:
    from stages.artifacts.artifact import Artifact
    from stages.artifacts.manifest import Shard

SHARD_NAME = "conversations-{:05d}.parquet"

conversations_schema = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("license", pa.string(), nullable=False),
        pa.field("category", pa.string(), nullable=False),
        pa.field(
            "messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])), nullable=False
        ),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class Conversation:
    """One row: a chat whose last answer, and usually each earlier one too, is the target's own.

    Attributes:
        messages: `{"role": ..., "content": ...}` each, as the chat template got them; answers without their
            end-of-turn token.
        input_ids: T token ids, T >= 1.
        loss_mask: T numbers, 1 where the target sampled the token, else 0; at least one is 1.
        finish_reason: how the last answer ended: "stop" (its last id ends the turn) or "length" (it was cut).

    Raises:
        ValueError: ids and mask differ in length, or the mask marks nothing.
    """

    id: str
    source: str
    license: str
    category: str
    messages: list[dict[str, str]]
    input_ids: list[int]
    loss_mask: list[int]
    finish_reason: str

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.loss_mask):
            raise ValueError(
                f"conversation {self.id}: {len(self.input_ids)} ids, {len(self.loss_mask)} mask values"
            )
        if not any(self.loss_mask):
            raise ValueError(f"conversation {self.id}: no token is the target's own")


def shard_name(index: int) -> str:
    """File name of shard `index`, counted from 0."""
    return SHARD_NAME.format(index)


def write_conversations(conversations: Iterable[Conversation]) -> bytes:
    """A shard as Parquet; the same rows give the same bytes."""
    table = pa.Table.from_pylist([asdict(row) for row in conversations], schema=conversations_schema)
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def read_conversations(artifact: Artifact, shards: Iterable[Shard] | None = None) -> Iterator[Conversation]:
    """The rows of a conversations artifact, shard after shard, in the order they were written.

    Args:
        shards: those of its shards to read, all by default.

    Raises:
        EagleError: a shard is damaged or has another schema.
    """
    for shard in artifact.manifest.shards if shards is None else shards:
        yield from _read_shard(artifact.read(shard.path), f"{artifact.uri}/{shard.path}")


def _read_shard(data: bytes, where: str) -> list[Conversation]:
    try:
        table = parquet.read_table(io.BytesIO(data))
        if not table.schema.equals(conversations_schema):
            raise EagleError(
                f"{where} is no shard of conversations, its columns differ: rerun eagle gen-data"
            )
        return [Conversation(**row) for row in table.to_pylist()]
    except (pa.ArrowException, ValueError) as error:
        raise EagleError(
            f"{where} cannot be read ({' '.join(str(error).split())}): rerun eagle gen-data"
        ) from None
