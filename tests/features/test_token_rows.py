"""Claims about reading ids and masks by number."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from stages.artifacts import Artifact, ArtifactWriter, open_artifact
from stages.artifacts.conversations import Conversation, shard_name, write_conversations
from stages.errors import EagleError
from stages.features.token_rows import TokenRows


def conversation(number: int) -> Conversation:
    length = 1 + number % 5
    return Conversation(
        id=str(number),
        source="test",
        license="",
        category="",
        messages=[],
        input_ids=[100 * number + i for i in range(length)],
        loss_mask=[i % 2 for i in range(length - 1)] + [1],
        finish_reason="stop",
    )


def artifact(uri: Path, shards: list[bytes], rows: list[int]) -> Artifact:
    with ArtifactWriter.open(str(uri), "conversations", {}) as writer:
        for number, (shard, count) in enumerate(zip(shards, rows, strict=True)):
            writer.add_shard(shard_name(number), shard, rows=count)
        writer.finish({})
    return open_artifact(str(uri), "conversations")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    sizes, shards, first = [3, 1, 4], [], 0
    for size in sizes:
        shards.append(write_conversations(conversation(n) for n in range(first, first + size)))
        first += size
    return artifact(tmp_path_factory.mktemp("c") / "c", shards, sizes)


def test_any_run_of_conversations_is_what_was_written(whole: Artifact) -> None:
    rows = TokenRows(whole)
    assert len(rows) == 8
    for start in range(9):
        for stop in range(start, 9):
            expected = [conversation(n) for n in range(start, stop)]
            found = list(rows.read(start, stop))
            assert [row.input_ids.tolist() for row in found] == [row.input_ids for row in expected]
            assert [row.loss_mask.tolist() for row in found] == [row.loss_mask for row in expected]


def test_only_the_shards_that_hold_them_are_read(tmp_path: Path) -> None:
    shards = [write_conversations([conversation(n)]) for n in range(3)]
    damaged = artifact(tmp_path / "c", [shards[0], b"no parquet", shards[2]], [1, 1, 1])
    rows = TokenRows(damaged)
    assert len(list(rows.read(0, 1))) == len(list(rows.read(2, 3))) == 1
    with pytest.raises(
        EagleError, match=r"cannot be read .* make the conversations again with eagle gen-data"
    ):
        list(rows.read(1, 2))


def table(ids: list, mask: list) -> bytes:
    sink = pa.BufferOutputStream()
    columns = {
        "input_ids": pa.array(ids, pa.list_(pa.int32())),
        "loss_mask": pa.array(mask, pa.list_(pa.uint8())),
    }
    parquet.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("shard", "rows", "reason"),
    [
        (table([[1, 2]], [[0, 1]]), 2, "has 1 rows and its manifest says 2"),
        (table([[1, 2], [3]], [[0], [1, 1]]), 2, "ids and loss masks of different lengths"),
        (table([[1, 2]], [[0, 2]]), 1, "a loss mask of other numbers than 0 and 1"),
        (table([[1, None]], [[0, 1]]), 1, "a list or a number in it is missing"),
        (table([None], [[0, 1]]), 1, "a list or a number in it is missing"),
    ],
)
def test_what_is_no_shard_of_conversations_is_refused_in_one_line(
    shard: bytes, rows: int, reason: str, tmp_path: Path
) -> None:
    damaged = artifact(tmp_path / "c", [shard], [rows])
    with pytest.raises(EagleError, match=reason) as error:
        list(TokenRows(damaged).read(0, 1))
    assert "\n" not in str(error.value)
