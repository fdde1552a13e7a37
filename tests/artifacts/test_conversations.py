from __future__ import annotations

from dataclasses import asdict, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.artifacts import ArtifactWriter, open_artifact
from stages.artifacts.conversations import (
    Conversation,
    conversations_schema,
    read_conversations,
    shard_name,
    write_conversations,
)
from stages.errors import EagleError

ROW = Conversation(
    id="a:1",
    source="prompts.jsonl",
    license="MIT",
    category="math",
    messages=[{"role": "user", "content": "1\u20282 \U0001f600"}, {"role": "assistant", "content": "3"}],
    input_ids=[5, 6, 7, 49151],
    loss_mask=[0, 0, 1, 1],
    finish_reason="stop",
)


def stored(uri, *shards: bytes):
    with ArtifactWriter.open(str(uri), "conversations", {}) as writer:
        for number, data in enumerate(shards):
            writer.add_shard(shard_name(number), data, rows=1)
        writer.finish({})
    return open_artifact(str(uri), "conversations")


def test_rows_come_back_as_written_over_all_shards(tmp_path):
    rows = [
        ROW,
        replace(ROW, id="a:2", license="", category="", finish_reason="length"),
        replace(ROW, id="b"),
    ]
    artifact = stored(tmp_path / "c", write_conversations(rows[:2]), write_conversations(rows[2:]))
    assert list(read_conversations(artifact)) == rows


def test_the_same_rows_give_the_same_bytes():
    assert write_conversations([ROW] * 3) == write_conversations([ROW] * 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": [0, 1]}, "4 ids, 2 mask values"),
        ({"loss_mask": [0, 0, 0, 0]}, "no token is the target's own"),
    ],
)
def test_a_row_with_a_wrong_mask_cannot_be_made(change, message):
    with pytest.raises(ValueError, match=message):
        replace(ROW, **change)


def test_shards_that_are_no_conversations_are_refused_in_one_line(tmp_path):
    foreign = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": ["x"]}), foreign)
    uneven = pa.BufferOutputStream()
    rows = pa.Table.from_pylist([asdict(ROW) | {"loss_mask": [1]}], schema=conversations_schema)
    pq.write_table(rows, uneven)
    for name, data in {"foreign": foreign.getvalue(), "uneven": uneven.getvalue(), "text": b"text"}.items():
        artifact = stored(tmp_path / name, bytes(data))
        with pytest.raises(
            EagleError, match=rf"{name}/conversations-00000-\w+\.parquet .*rerun eagle gen-data"
        ) as caught:
            list(read_conversations(artifact))
        assert "\n" not in str(caught.value)


def test_ids_and_masks_are_stored_in_four_bytes_and_one():
    assert conversations_schema.field("input_ids").type == pa.list_(pa.int32())
    assert conversations_schema.field("loss_mask").type == pa.list_(pa.uint8())
