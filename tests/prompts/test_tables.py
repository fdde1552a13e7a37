from __future__ import annotations

import io
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.prompts.row import Broken, BrokenOffError
from stages.prompts.tables import csv_rows, parquet_rows, tsv_rows


def table(content: str | bytes, read=csv_rows) -> list:
    return [
        value for _, value in read(io.BytesIO(content if isinstance(content, bytes) else content.encode()))
    ]


def parquet(data: pa.Table, **options) -> list:
    buffer = io.BytesIO()
    pq.write_table(data, buffer, **options)
    buffer.seek(0)
    return [value for _, value in parquet_rows(buffer)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('prompt,id\r\n"a ""b"", c\r\nd",1\r\n', [{"prompt": 'a "b", c\r\nd', "id": "1"}]),
        ('prompt,id\nsay "hi",2\n', [{"prompt": 'say "hi"', "id": "2"}]),
        ("prompt,id\ra,1\rb,2\r", [{"prompt": "a", "id": "1"}, {"prompt": "b", "id": "2"}]),
        ("prompt;id\nhello, you;1\n", [{"prompt": "hello, you", "id": "1"}]),
        (" prompt , id\n\n\na,\n", [{"prompt": "a"}]),
        ("prompt,prompt\na,b\n", [{"prompt": "b"}]),
        ("prompt,id\na\nb,1,,\n", [{"prompt": "a"}, {"prompt": "b", "id": "1"}]),
        ("prompt\na\x00b\n", [{"prompt": "a\x00b"}]),
        ("prompt\n" + "x" * 300_000, [{"prompt": "x" * 300_000}]),
        ("prompt\n", []),
        ("", []),
    ],
)  # fmt: skip
def test_csv_is_read_as_spreadsheets_write_it(content, expected):
    assert table(content) == expected


def test_tabs_separate_where_the_name_says_so():
    assert table("prompt, all of it\tid\na, b\t1\n", tsv_rows) == [{"prompt, all of it": "a, b", "id": "1"}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [(b"hello, how are you,5", "bad_csv"), (b'"a"b,1', "bad_csv"), (b"caf\xe9,1", "not_utf8")],
)
def test_a_row_that_cannot_be_told_apart_costs_no_other(row, reason):
    first, broken, last = table(b"prompt,id\na,1\n" + row + b"\nb,2\n")
    assert (first["prompt"], last["prompt"]) == ("a", "b")
    assert isinstance(broken, Broken)
    assert broken.reason == reason


def test_a_quote_without_an_end_is_no_text():
    rows = csv_rows(io.BytesIO(b'prompt\na\n"b\nc\nd\n'))
    assert next(rows) == (1, {"prompt": "a"})
    with pytest.raises(BrokenOffError, match="ends within quotes"):
        next(rows)


def test_a_quote_that_takes_in_too_much_costs_its_row(monkeypatch):
    monkeypatch.setattr("stages.prompts.tables.LONGEST_ROW", 1000)
    first, broken, *others = table('prompt\na\n"b\n' + "c\n" * 1000 + "d\n")
    assert first == {"prompt": "a"}
    assert broken.reason == "bad_csv"
    assert others[-1] == {"prompt": "d"}


def test_parquet_gives_lists_of_objects_dictionaries_and_nulls():
    messages = [[{"role": "user", "content": "a", "name": None}], None]
    kinds = pa.table({"messages": messages, "tag": pa.array(["x", None]).dictionary_encode()})
    assert parquet(kinds, row_group_size=1) == [
        {"messages": m, "tag": t} for m, t in zip(messages, ["x", None], strict=True)
    ]


def test_cells_that_python_has_no_value_for_do_no_harm_and_texts_that_are_none_cost_their_row():
    years = pa.table({"prompt": ["a", "b"], "at": pa.array([2**62, 0], pa.timestamp("us"))})
    assert [row["prompt"] for row in parquet(years)] == ["a", "b"]
    ends = pa.py_buffer(np.array([0, 2, 4], np.int32).tobytes())
    texts = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"\xff\xfeok")])
    broken, fine = parquet(pa.table({"prompt": texts}))
    assert broken.reason == "not_utf8"
    assert fine == {"prompt": "ok"}


def test_a_damaged_page_ends_a_table_behind_the_rows_before_it():
    buffer = io.BytesIO()
    texts = [f"{i} " + "x" * 50 for i in range(3000)]
    pq.write_table(
        pa.table({"prompt": texts}), buffer, row_group_size=1024, compression="zstd", use_dictionary=False
    )
    data = bytearray(buffer.getvalue())
    start = pq.read_metadata(io.BytesIO(data)).row_group(1).column(0).data_page_offset
    data[start + 40 : start + 140] = b"\0" * 100
    rows = parquet_rows(io.BytesIO(bytes(data)))
    assert [row["prompt"] for _, row in islice(rows, 1024)] == texts[:1024]
    with pytest.raises(BrokenOffError, match="damaged"):
        list(rows)


def test_a_failing_disk_is_no_damaged_file():
    class Failing(io.BytesIO):
        def read(self, *size):
            raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        list(parquet_rows(Failing(b"PAR1" * 100)))
