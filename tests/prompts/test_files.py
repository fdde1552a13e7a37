from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.errors import EagleError
from stages.prompts import Rejected, iter_prompts, read_prompts

ROWS = [{"id": "a", "prompt": "one\u2028two"}, {"id": "b", "prompt": 'three, "four"\nfive'}]
TURNS = [(row["prompt"],) for row in ROWS]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
MANY = [f"question {i} {i * 7919 % 1000}" for i in range(5000)]


def turns(src) -> list[tuple[str, ...]]:
    return [prompt.turns for prompt in read_prompts(str(src))]


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def parquet(texts: list[str]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"prompt": texts}), buffer)
    return buffer.getvalue()


PACKERS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".zip": lambda data: zipped(p=data),
}
STREAMED = [ending for ending in PACKERS if ending != ".zip"]
CONTENTS = {
    "p.jsonl": "".join(json.dumps({"prompt": text}) + "\n" for text in MANY).encode(),
    "p.json": json.dumps([{"prompt": text} for text in MANY]).encode(),
    "p.csv": "\n".join(["prompt", *MANY]).encode(),
    "p.parquet": parquet(MANY),
}


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("name", CONTENTS)
def test_every_type_is_read_from_every_kind_of_compression(tmp_path, name, ending):
    path = tmp_path / f"{name}{ending}"
    path.write_bytes(PACKERS[ending](CONTENTS[name]))
    assert turns(path) == [(text,) for text in MANY]


@pytest.mark.parametrize("ending", STREAMED)
def test_members_follow_each_other_and_padding_is_nothing(tmp_path, ending):
    path = tmp_path / f"p.jsonl{ending}"
    path.write_bytes(PACKERS[ending](LINES[:20]) + PACKERS[ending](LINES[20:]) + b"\0" * 100_000)
    assert turns(path) == TURNS


def test_the_content_says_how_a_file_is_packed_and_not_its_name(tmp_path):
    for name, data in (
        ("p.jsonl.gz", LINES),
        ("p.jsonl", gzip.compress(LINES)),
        ("p.gz.jsonl", bz2.compress(LINES)),
    ):
        (tmp_path / name).write_bytes(data)
        assert turns(tmp_path / name) == TURNS
    (tmp_path / "inside.zip").write_bytes(zipped(**{"p.jsonl.gz": gzip.compress(LINES)}))
    assert turns(tmp_path / "inside.zip") == TURNS


def _or_error(rows):
    """None in place of the first row where the cut is before it."""
    try:
        yield next(rows)
    except EagleError as error:
        if "end too early" not in str(error):
            raise
        yield None


@settings(max_examples=25, deadline=None)
@given(
    cut=st.integers(40, 10_000),
    name=st.sampled_from(["p.jsonl", "p.json", "p.csv"]),
    ending=st.sampled_from(STREAMED),
)
def test_a_packed_file_cut_anywhere_gives_a_beginning_and_says_so(tmp_path_factory, cut, name, ending):
    data = PACKERS[ending](CONTENTS[name])
    path = tmp_path_factory.mktemp("cut") / f"{name}{ending}"
    path.write_bytes(data[: min(cut, len(data) - 1)])
    rows = iter_prompts(str(path))
    if (first := next(_or_error(rows))) is None:
        return
    *prompts, last = [first, *rows]
    assert [prompt.turns[0] for prompt in prompts] == MANY[: len(prompts)]
    assert isinstance(last, Rejected)
    assert last.reason == "cut_off"


@pytest.mark.parametrize("ending", STREAMED)
def test_what_is_no_packed_data_behind_some_is_counted_and_costs_nothing_before_it(tmp_path, ending):
    path = tmp_path / f"p.jsonl{ending}"
    path.write_bytes(PACKERS[ending](CONTENTS["p.jsonl"]) + b"garbage")
    *prompts, last = iter_prompts(str(path))
    assert [prompt.turns[0] for prompt in prompts] == MANY
    assert isinstance(last, Rejected)
    assert "followed by something else" in str(last)


def test_an_archive_gives_all_its_prompt_files_with_their_names(tmp_path):
    path = tmp_path / "all.zip"
    members = {"README.txt": b"{", "d/b.csv": b"prompt\nthree\n", "a.jsonl": b'{"prompt": "one"}\n{"x": 1}',
               "__MACOSX/d/._b.csv": b"\0", "d/c.parquet": parquet(["four"])}  # fmt: skip
    path.write_bytes(zipped(**members))
    found = list(iter_prompts(str(path)))
    assert [row.id for row in found if not isinstance(row, Rejected)] == [
        "b.csv:1",
        "a.jsonl:1",
        "c.parquet:1",
    ]
    [rejected] = [row for row in found if isinstance(row, Rejected)]
    assert str(rejected).startswith(f"{path}, a.jsonl, line 2 ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped(), "no prompt file in it"),
        (zipped(**{"README.txt": b"x", "b.txt": b"x"}), "no prompt file in it"),
        (b"PK\x03\x04nonsense", "cannot be unpacked"),
        (zipped(**{"p.jsonl": b""})[:-10], "cannot be unpacked"),
    ],
)
def test_an_archive_without_prompts_says_so(tmp_path, content, message):
    path = tmp_path / "p.jsonl.zip"
    path.write_bytes(content)
    with pytest.raises(EagleError, match=message) as caught:
        read_prompts(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.csv"])
def test_a_byte_order_mark_says_the_encoding(tmp_path, name, encoding):
    texts = {
        "p.jsonl": json.dumps(ROWS[0]),
        "p.json": json.dumps(ROWS[:1]),
        "p.csv": "prompt\none\u2028two\n",
    }
    (tmp_path / name).write_text(texts[name], encoding=encoding)
    assert turns(tmp_path / name) == TURNS[:1]


def test_a_file_without_an_ending_is_looked_into(tmp_path):
    for content in (
        LINES,
        json.dumps(ROWS).encode(),
        parquet([row["prompt"] for row in ROWS]),
        gzip.compress(LINES),
    ):
        (tmp_path / "prompts").write_bytes(content)
        assert turns(tmp_path / "prompts") == TURNS


def test_messages_in_a_column_of_text_are_read(tmp_path):
    chat = json.dumps([{"role": "user", "content": "one"}]).replace('"', '""')
    path = tmp_path / "p.csv"
    path.write_text(f'id,messages\n1,"{chat}"\n')
    assert turns(path) == [("one",)]


def test_a_pattern_names_the_files_that_match_in_order(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    (tmp_path / "c.parquet").write_bytes(parquet(["c"]))
    (tmp_path / "notes.txt").write_text("no prompts")
    (tmp_path / "d.jsonl").mkdir()
    (tmp_path / "e.jsonl").symlink_to(tmp_path / "a.jsonl")
    found = read_prompts(str(tmp_path / "*"))
    assert [prompt.turns[0] for prompt in found] == ["a", "b", "c", "a"]
    assert [prompt.id for prompt in found] == ["a.jsonl:1", "b.jsonl:1", "c.parquet:1", "e.jsonl:1"]
    assert {prompt.source for prompt in found} == {str(tmp_path / "*")}


def test_a_name_with_the_marks_of_patterns_is_a_name_where_there_is_such_a_file(tmp_path):
    (tmp_path / "p[1]?.jsonl").write_bytes(LINES)
    assert turns(tmp_path / "p[1]?.jsonl") == TURNS
