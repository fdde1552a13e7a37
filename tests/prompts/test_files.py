from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from stages.prompts import Prompt, Rejected, iter_prompts, read_prompts

ROWS = [
    {"id": "a", "prompt": "one\u2028two", "rank": 1.5, "tags": [{"x": None}]},
    {"id": "b", "prompt": 'three, "four"\nfive'},
]
TURNS = [("one\u2028two",), ('three, "four"\nfive',)]


def turns(src) -> list[tuple[str, ...]]:
    return [prompt.turns for prompt in read_prompts(str(src))]


def zipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("p.jsonl", data)
    return buffer.getvalue()


PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".zip": zipped,
}
JSON = {
    "array": json.dumps(ROWS, indent=2),
    "array in one line, with a byte order mark": "\ufeff" + json.dumps(ROWS, ensure_ascii=False),
    "array in an object": json.dumps({"version": 2, "note": {"x": [1]}, "data": ROWS, "more": [1, 2]}),
    "lines": "".join(json.dumps(row) + "\n" for row in ROWS),
}


@pytest.mark.parametrize("form", JSON)
def test_json_files_hold_an_array_an_object_with_one_or_lines(tmp_path, form):
    path = tmp_path / "p.json"
    path.write_text(JSON[form], encoding="utf-8")
    assert turns(path) == TURNS
    assert [prompt.id for prompt in read_prompts(str(path))] == ["a", "b"]


@given(st.lists(st.dictionaries(st.text(max_size=5), st.recursive(st.none() | st.booleans() | st.text(max_size=5) | st.integers(-2**31, 2**31), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6), max_size=3), max_size=4))  # fmt: skip  # noqa: E501
def test_an_array_anywhere_reads_as_json_reads_it(tmp_path_factory, rows):
    from stages.prompts.files import file_rows

    folder = tmp_path_factory.mktemp("json")
    for name, content in (("top", rows), ("nested", {"a": 1, "rows": rows})):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        assert [row for _, _, row in file_rows(str(path))] == rows


@pytest.mark.parametrize("cut", [1, 30, 90])
def test_an_array_that_ends_too_early_gives_its_whole_rows_and_says_so(tmp_path, cut):
    text = json.dumps([{"prompt": f"question {i}"} for i in range(50)])
    path = tmp_path / "p.json"
    path.write_text(text[:-cut])
    *prompts, last = iter_prompts(str(path))
    assert all(isinstance(prompt, Prompt) for prompt in prompts)
    assert len(prompts) == text[:-cut].count("}")
    assert isinstance(last, Rejected)
    assert last.reason == "cut_off"


def test_broken_json_in_the_middle_gives_what_is_before_it(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('[{"prompt": "one"}, {"prompt": nonsense}, {"prompt": "three"}]')
    first, second = iter_prompts(str(path))
    assert isinstance(first, Prompt)
    assert isinstance(second, Rejected)
    assert second.reason == "bad_json"


@pytest.mark.parametrize("ending", PACKERS)
def test_compressed_files_are_unpacked(tmp_path, ending):
    path = tmp_path / f"p.jsonl{ending}"
    path.write_bytes(PACKERS[ending](JSON["lines"].encode()))
    assert turns(path) == TURNS


def test_a_compressed_file_that_ends_too_early_gives_its_whole_rows_and_says_so(tmp_path):
    lines = "".join(json.dumps({"prompt": f"question {i} {i * 7919 % 1000}"}) + "\n" for i in range(20_000))
    data = gzip.compress(lines.encode())
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(data[: len(data) // 2])
    *prompts, last = iter_prompts(str(path))
    assert len(prompts) > 5_000
    assert isinstance(last, Rejected)
    assert last.reason == "cut_off"


@pytest.mark.parametrize(("name", "delimiter"), [("p.csv", ","), ("p.TSV", "\t")])
def test_tables_as_text_are_read_with_quotes_and_byte_order_mark(tmp_path, name, delimiter):
    quoted = ROWS[1]["prompt"].replace('"', '""')
    lines = [["id", "prompt"], ["a", "one\u2028two"], ["b", f'"{quoted}"'], ["c", ""]]
    path = tmp_path / name
    path.write_text(
        "\ufeff" + "\r\n".join(delimiter.join(line) for line in lines), encoding="utf-8", newline=""
    )
    *prompts, last = iter_prompts(str(path))
    assert [prompt.turns for prompt in prompts] == TURNS
    assert isinstance(last, Rejected)


def test_messages_in_a_column_of_text_are_read(tmp_path):
    chat = json.dumps([{"role": "user", "content": "one"}]).replace('"', '""')
    path = tmp_path / "p.csv"
    path.write_text(f'id,messages\n1,"{chat}"\n')
    assert turns(path) == [("one",)]


def test_a_pattern_names_the_files_that_match_in_order(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    pq.write_table(pa.table({"prompt": ["c"]}), tmp_path / "c.parquet")
    (tmp_path / "notes.txt").write_text("no prompts")
    found = read_prompts(str(tmp_path / "*"))
    assert [prompt.turns[0] for prompt in found] == ["a", "b", "c"]
    assert [prompt.id for prompt in found] == ["a.jsonl:1", "b.jsonl:1", "c.parquet:1"]
    assert {prompt.source for prompt in found} == {str(tmp_path / "*")}


def test_files_are_read_over_http(tmp_path):
    (tmp_path / "p.jsonl").write_text(JSON["lines"])

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args) -> None:
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert turns(f"http://127.0.0.1:{server.server_port}/p.jsonl?download=true") == TURNS
        server.shutdown()
