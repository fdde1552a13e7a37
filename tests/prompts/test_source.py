from __future__ import annotations

import json
import time

import fsspec
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.errors import EagleError
from stages.prompts import Prompt, iter_prompts, read_prompts
from stages.prompts.hub import hub_rows
from tests.tiny import write_jsonl

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "someone else's answer"},
    {"role": "user", "content": "two"},
]


def test_a_row_that_is_no_prompt_is_named_by_file_and_line(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "fine"}, {"title": "x"}])
    with pytest.raises(EagleError, match=r"p\.jsonl, line 2 is no prompt, its keys are: title") as caught:
        read_prompts(str(path))
    assert "\n" not in str(caught.value)
    assert [type(row).__name__ for row in iter_prompts(str(path))] == ["Prompt", "Rejected"]


def test_ids_categories_and_licenses_of_rows_are_kept(tmp_path):
    rows = [{"id": 7, "prompt": "a", "category": "math", "license": "MIT"}, {"id": "x", "prompt": "b"}]
    first, second = read_prompts(str(write_jsonl(tmp_path / "p.jsonl", rows)))
    assert (first.id, first.category, first.license) == ("7", "math", "MIT")
    assert (second.id, second.category, second.license) == ("x", "", "")


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x1c", "\r"])
def test_lines_end_at_newline_bytes_only(tmp_path, separator):
    text = f"one{separator}two"
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": text}, {"prompt": "three"}])
    assert [prompt.turns for prompt in read_prompts(str(path))] == [(text,), ("three",)]


def test_blank_lines_carriage_returns_byte_order_mark_and_a_missing_last_newline_do_no_harm(tmp_path):
    path = tmp_path / "p.JSONL"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}')
    assert [(p.id, p.turns) for p in read_prompts(str(path))] == [
        ("p.JSONL:1", ("a",)),
        ("p.JSONL:4", ("b",)),
    ]


def test_the_first_line_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "a"\n')
    with pytest.raises(EagleError, match=r"p\.jsonl, line 3 is not JSON") as caught:
        read_prompts(str(path))
    assert "\n" not in str(caught.value)


def test_half_an_emoji_is_replaced_and_a_whole_one_is_kept(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(rb'{"prompt": "half \ud83d, whole \ud83d\ude00"}')
    assert read_prompts(str(path))[0].turns == ("half \ufffd, whole \U0001f600",)


def test_prompts_are_read_one_by_one_and_no_further_than_the_limit(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}\nnot JSON\n')
    assert [prompt.turns for prompt in read_prompts(str(path), limit=2)] == [("a",), ("b",)]
    assert next(iter_prompts(str(path))).turns == ("a",)


def test_parquet_gives_the_same_prompts_as_json_lines(tmp_path):
    rows = [{"id": "a", "messages": CHAT, "tags": ["x"]}, {"id": None, "messages": CHAT[1:], "tags": None}]
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1)
    first, second = read_prompts(str(path))
    assert first == Prompt("a", ("one", "two"), str(path), system="Be brief.")
    assert second == Prompt("p.parquet:2", ("one", "two"), str(path))
    pq.write_table(pa.table({"title": ["x"]}), path)
    with pytest.raises(EagleError, match=r"p\.parquet, row 1 is no prompt, its keys are: title"):
        read_prompts(str(path))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_are_read_from_any_file_system(kind):
    uri = f"memory://prompts/p.{kind}"
    with fsspec.open(uri, "wb") as file:
        if kind == "jsonl":
            file.write(json.dumps({"prompt": "one"}).encode())
        else:
            pq.write_table(pa.table({"prompt": ["one"]}), file)
    assert read_prompts(uri) == [Prompt(f"p.{kind}:1", ("one",), uri)]


def test_the_built_in_sets_are_sources():
    first = read_prompts("builtin:chat", limit=3)
    assert [prompt.source for prompt in first] == ["builtin:chat"] * 3
    assert all(prompt.id and prompt.category and prompt.turns for prompt in first)
    with pytest.raises(EagleError, match="nonsense"):
        read_prompts("builtin:nonsense")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", None, "not found"),
        ("p.jsonl", b"", "no rows"),
        ("p.jsonl", b"\n \n", "no rows"),
        ("p.parquet", b"not Parquet", "cannot be read: it is not Parquet"),
        ("p.parquet", b"", "cannot be read: it is not Parquet"),
        ("p.txt", b"text", r"use \.jsonl, "),
        ("p.csv", None, "not found"),
        ("p.csv", b"prompt\n\xff\n", "row 1 is not text in UTF-8"),
        ("p.json", b"[nonsense", "cannot be read: it is not JSON"),
        ("p.json", b'[{"prompt": "a', "cannot be read: its JSON ends too early"),
        ("p.json", b"[" * 200_000, "nested too deeply"),
        ("p.json", b"[]", "no rows"),
        ("p.jsonl", b"<html>\n", "is a web page"),
        ("p.parquet", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ("p.jsonl.gz", b"\x1f\x8b\x08", "its gzip data end too early"),
        ("p.jsonl.zst", b"\x28\xb5\x2f\xfdnonsense", "its zstd data are damaged"),
        ("*.jsonl", None, "no prompt file matches"),
        ("p", None, "not found"),
    ],
)
def test_files_that_give_no_prompts_say_why_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EagleError, match=message) as caught:
        read_prompts(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_data_set_is_streamed_from_its_training_split(tmp_path):
    write_jsonl(tmp_path / "test.jsonl", [{"prompt": "held out"}])
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "one"}, {"prompt": "two"}])
    # A folder is a data set to the library; only ids of the hub lead here from outside.
    rows = list(hub_rows("x", str(tmp_path)))
    assert [row.value["prompt"] for row in rows] == ["one", "two"]
    assert [row.name for row in rows] == [f"{tmp_path.name}:1", f"{tmp_path.name}:2"]
    with pytest.raises(EagleError, match="no split dev, it has train, test"):
        list(hub_rows("x", str(tmp_path), split="dev"))


def test_pictures_of_a_data_set_are_not_decoded(tmp_path):
    broken = pa.array(
        [{"bytes": b"no picture", "path": None}], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    )
    feature = {
        "info": {"features": {"prompt": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}}
    }
    table = pa.table({"prompt": ["one"], "image": broken})
    pq.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps(feature)}), tmp_path / "train.parquet"
    )
    assert [row.value["prompt"] for row in hub_rows("x", str(tmp_path))] == ["one"]


def test_a_data_set_out_of_reach_is_one_line_and_no_wait(monkeypatch, capfd):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    start = time.monotonic()
    with pytest.raises(EagleError, match="prompts nobody/nothing: no such file") as caught:
        read_prompts("nobody/nothing")
    assert time.monotonic() - start < 5
    assert "\n" not in str(caught.value)
    assert "Retry" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "src", ["", "  ", "a\nb.jsonl", "a\x1b[31m.jsonl", "p\udcff.jsonl", "x" * 5000 + ".jsonl"]
)
def test_names_that_cannot_be_shown_are_refused_in_one_line(src):
    with pytest.raises(EagleError) as caught:
        read_prompts(src)
    assert str(caught.value).isprintable()


def test_a_folder_is_no_file_and_the_message_says_what_is(tmp_path):
    (tmp_path / "set.jsonl").mkdir()
    for src in (tmp_path, tmp_path / "set.jsonl"):
        with pytest.raises(EagleError, match=rf"is a folder: give a pattern such as {src}/\*\.jsonl"):
            read_prompts(str(src))
