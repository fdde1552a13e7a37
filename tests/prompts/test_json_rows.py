from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.prompts.json_rows import json_lines, json_rows
from stages.prompts.row import Broken, BrokenOffError

A, B = {"prompt": "one\u2028two"}, {"prompt": "three", "rank": 1.5}
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
KEYS = st.text(max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5) | st.integers(-(2**31), 2**31),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def rows(content: str | bytes, read=json_rows) -> list:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return [value for _, value in read(io.BytesIO(data))]


def until_it_breaks(content: str | bytes) -> tuple[list, str]:
    """The rows before the place where nothing more can be read, and the reason."""
    found = []
    data = content if isinstance(content, bytes) else content.encode()
    try:
        for _, value in json_rows(io.BytesIO(data)):
            found.append(value)
    except BrokenOffError as error:
        return found, error.reason
    return found, ""


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (json.dumps([A, B]), [A, B]),
        (json.dumps([A, B], indent=2, ensure_ascii=False), [A, B]),
        ("[]", []),
        ("[null, 3]", [None, 3]),
        ("", []),
        ('{"version": 2, "note": {"x": [1]}, "tags": ["t"], "data": [{"a": 1}], "more": [1]}', [{"a": 1}]),
        ('{"train": [{"prompt": "a"}], "test": [{"prompt": "b"}]}', [{"prompt": "a"}, {"prompt": "b"}]),
        (json.dumps({"conversations": [{"id": 1, "messages": CHAT}]}), [{"id": 1, "messages": CHAT}]),
        (json.dumps({"prompt": "a"}), [{"prompt": "a"}]),
        (json.dumps({"id": 1, "messages": CHAT, "votes": [A]}), [{"id": 1, "messages": CHAT, "votes": [A]}]),
        (json.dumps({"tools": [A], "messages": CHAT}, indent=1), [{"tools": [A], "messages": CHAT}]),
        (json.dumps(CHAT), [CHAT]),
        (json.dumps([CHAT, CHAT]), [CHAT, CHAT]),
        ("{}", [{}]),
        (f"{json.dumps(A)}\n{json.dumps(B)}\n", [A, B]),
        (f"\n \n{json.dumps(A)}\r\n\r\n{json.dumps(B)}", [A, B]),
        (f"{json.dumps(CHAT)}\n{json.dumps(CHAT)}\n", [CHAT, CHAT]),
        (f"{json.dumps(A, indent=2)}\n{json.dumps(B, indent=2)}\n", [A, B]),
        (json.dumps([A]) + "\n" + json.dumps([B]), [A, B]),
        (json.dumps({"prompt": "x" * 100_000}) + "\n" + json.dumps(B), [{"prompt": "x" * 100_000}, B]),
        ('[{"prompt": "a\tb\x00"}, {"x": Infinity},]', [{"prompt": "a\tb\x00"}, {"x": float("inf")}]),
        ('[{"id": ' + "9" * 50 + "}]", [{"id": int("9" * 50)}]),
        ('[{"prompt": "a", "prompt": "b"}]', [{"prompt": "b"}]),
    ],
)  # fmt: skip
def test_rows_are_found_in_whatever_form_the_file_has(content, expected):
    assert rows(content) == expected


@settings(max_examples=60)
@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=3), max_size=4), st.sampled_from([None, 1]))
def test_an_array_anywhere_reads_as_json_reads_it(found, indent):
    assert rows(json.dumps(found, indent=indent)) == found
    if found:
        assert rows(json.dumps({"a": 1, "rows": found}, indent=indent, ensure_ascii=False)) == found


@settings(max_examples=60)
@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=3), min_size=1, max_size=5), st.data())
def test_an_array_cut_anywhere_gives_its_whole_rows(found, data):
    text = json.dumps(found).encode()
    cut = data.draw(st.integers(1, len(text) - 1))
    *_, last = ends = [len(json.dumps(found[:n])) - 1 for n in range(len(found) + 1)]
    whole = sum(end <= cut for end in ends[1:]) if cut <= last else len(found)
    kept, reason = until_it_breaks(text[:cut])
    assert (kept, reason) == (found[:whole], "cut_off")


@pytest.mark.parametrize(
    "content",
    [
        ', {"prompt": nonsense}]',
        "] trailing",
        ' {"prompt": "b"}]',
        ', {"x": ' + "[" * 200_000 + "1",
        ', {"id": ' + "9" * 5000 + "}]",
        ", {3: 4}]",
    ],
)
def test_broken_json_in_the_middle_gives_what_is_before_it(content):
    assert until_it_breaks('[{"prompt": "one"}' + content) == ([{"prompt": "one"}], "bad_json")


def test_text_that_is_not_utf8_costs_its_row_and_no_other():
    found = rows(b'[{"prompt": "a"}, {"prompt": "\xff"}, {"prompt": "c"}]')
    assert [found[0], found[2]] == [{"prompt": "a"}, {"prompt": "c"}]
    assert found[1].reason == "not_utf8"
    [whole] = rows(b'{"messages": [{"role": "user", "content": "\xff"}]}')
    assert whole.reason == "not_utf8"


def test_a_long_value_is_not_parsed_again_for_every_piece_of_it():
    text = "ab " * 10_000_000
    [row, last] = rows(json.dumps([{"prompt": text}, B]))
    assert (row["prompt"], last) == (text, B)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{'prompt': 'a'}", "bad_json"),
        (b'{"prompt": "a"', "bad_json"),
        (b'{"prompt": "\xff"}', "not_utf8"),
        (b'{"prompt": "a"} {"prompt": "b"}', "bad_json"),
        (b"[" * 100_000, "bad_json"),
        (b'{"id": ' + b"9" * 5000 + b"}", "bad_json"),
        (b"\x00" * 10, "bad_json"),
    ],
)
def test_a_line_that_is_not_json_costs_no_other(line, reason):
    first, broken, last = rows(b'{"prompt": "a"}\n\n' + line + b'\n\xef\xbb\xbf{"prompt": "b"}', json_lines)
    assert (first, last) == ({"prompt": "a"}, {"prompt": "b"})
    assert isinstance(broken, Broken)
    assert (broken.reason, "\n" in broken.detail) == (reason, False)


def test_rows_without_an_end_do_not_take_all_memory(monkeypatch):
    monkeypatch.setattr("stages.prompts.json_rows.LONGEST_ROW", 3_000_000)
    long = json.dumps({"prompt": "x" * 5_000_000}).encode()
    first, broken, last = rows(b'{"prompt": "a"}\n' + long + b'\n{"prompt": "b"}\n', json_lines)
    assert (first, last) == ({"prompt": "a"}, {"prompt": "b"})
    assert broken.reason == "bad_json"
    assert until_it_breaks(b'[{"prompt": "a"}, ' + long + b"]") == ([{"prompt": "a"}], "bad_json")


def test_lines_are_numbered_as_an_editor_does():
    numbers = [number for number, _ in json_lines(io.BytesIO(b'\n{"a": 1}\n\n\n[1]\n'))]
    assert numbers == [2, 5]


@pytest.mark.parametrize("content", [json.dumps([A, B]), json.dumps([A, B], indent=1)])
def test_an_array_under_the_name_of_lines_is_read_as_one(content):
    assert rows(content, json_lines) == [A, B]
