from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

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


def stored(*shards: bytes):
    """What the reader needs of an artifact: its shards' names and bytes."""
    files = {shard_name(i): data for i, data in enumerate(shards)}
    manifest = SimpleNamespace(shards=[SimpleNamespace(path=name) for name in files])
    return SimpleNamespace(uri="runs/c", manifest=manifest, read=files.__getitem__)


def test_rows_come_back_as_written_over_all_shards():
    rows = [ROW, replace(ROW, id="a:2", license="", category="", finish_reason="length"), replace(ROW, id="b")]
    assert list(read_conversations(stored(write_conversations(rows[:2]), write_conversations(rows[2:])))) == rows


def test_the_same_rows_give_the_same_bytes():
    assert write_conversations([ROW] * 3) == write_conversations([ROW] * 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"loss_mask": [0, 1]}, "4 ids, 2 mask values"), ({"loss_mask": [0, 0, 0, 0]}, "no token is the target's own")],
)
def test_a_row_with_a_wrong_mask_cannot_be_made(change, message):
    with pytest.raises(ValueError, match=message):
        replace(ROW, **change)


def test_damaged_and_foreign_shards_are_refused_in_one_line():
    good = write_conversations([ROW])
    sink = pa.BufferOutputStream()
    foreign = pa.table({"id": ["x"]})
    pa.parquet.write_table(foreign, sink)
    for data in (good[: len(good) // 2], b"", sink.getvalue().to_pybytes()):
        with pytest.raises(EagleError, match="runs/c/conversations-00000.parquet .*rerun eagle gen-data") as caught:
            list(read_conversations(stored(data)))
        assert "\n" not in str(caught.value)


def test_ids_and_masks_are_stored_in_four_bytes_and_one():
    assert conversations_schema.field("input_ids").type == pa.list_(pa.int32())
    assert conversations_schema.field("loss_mask").type == pa.list_(pa.uint8())
