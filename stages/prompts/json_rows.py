"""Rows of JSON files, one at a time: a line each, or the items of arrays, however large the file."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from typing import IO, Any

from stages.prompts.messages import is_message
from stages.prompts.row import LONGEST_ROW, Broken, BrokenOffError
from stages.prompts.shapes import MESSAGE_FIELDS, PREFERENCE_FIELDS, TEXT_FIELDS, TOOL_FIELDS
from stages.prompts.streams import peeked, some

_HEAD = 1 << 16
_CHUNK = 1 << 20
_TOKEN = 16
"""No number or name is cut in two so far from the end of what was read; only texts are longer."""

_ESCAPE = len(r"\u0000")
_NAMES = ("null", "true", "false", "NaN", "Infinity", "-Infinity")
_ROW_FIELDS = {*MESSAGE_FIELDS, *PREFERENCE_FIELDS, *TEXT_FIELDS, *TOOL_FIELDS, "turns"}
_CHAT_FIELDS = {*MESSAGE_FIELDS, "turns"}
_NO_UTF8 = re.compile("[\udc80-\udcff]")
_BLANK = re.compile(r"[ \t\n\r\ufeff]*")
_decoder = json.JSONDecoder(strict=False)  # raw control characters in texts are dirt that does no harm


def json_lines(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """Number and value of each line that is not blank; one that is no JSON is `Broken`.

    Lines end at newline bytes only: strings may hold U+2028 and its like as they are. A file that is an array
    in spite of its name is read as one.

    Raises:
        BrokenOffError: as `json_rows`.
    """
    head, whole = peeked(file, _HEAD)
    if head.lstrip()[:1] == b"[" and not _is_lines(head):
        yield from json_rows(whole)
    else:
        yield from _lines(whole)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := file.readline(LONGEST_ROW):
        number += 1
        if len(line) == LONGEST_ROW and not line.endswith(b"\n"):
            while (rest := file.readline(_CHUNK)) and not rest.endswith(b"\n"):
                pass
            yield number, Broken("bad_json", f"is longer than {LONGEST_ROW:,} bytes")
        elif not line.isspace():
            yield number, _line_value(line)


def json_rows(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """The rows of a JSON file, whatever its name says: of lines, of arrays, of objects with arrays of rows.

    An object without such an array is itself a row. Several arrays or objects may follow each other.

    Raises:
        BrokenOffError: behind the rows before it: the file ends too early, or is no JSON from there on.
    """
    head, whole = peeked(file, _HEAD)
    if _is_lines(head):
        yield from _lines(whole)
    else:
        yield from enumerate(_document_rows(_Text(whole)), start=1)


def _line_value(line: bytes) -> Any:
    try:
        return _decoder.decode(line.decode().strip("\ufeff \t\r\n"))
    except UnicodeDecodeError as error:
        return Broken("not_utf8", f"is not text in UTF-8 ({error.reason} at byte {error.start})")
    except (ValueError, RecursionError) as error:
        return Broken("bad_json", f"is not JSON ({_reason(error)}): each line must be one object")


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return " ".join(str(error).split())[:200]


def _is_lines(head: bytes) -> bool:
    """Whether a file that begins like this has a row a line."""
    first, _, rest = head.lstrip(b" \t\r\n").partition(b"\n")
    if first[:1] not in (b"{", b"["):
        return True
    value = _line_value(first)
    if isinstance(value, Broken) or not rest.strip():
        return False
    rows_in_it = isinstance(value, list) and value and isinstance(value[0], Mapping)
    return not rows_in_it or is_message(value[0])


def _document_rows(text: _Text) -> Iterator[Any]:
    while begin := text.peek():
        if begin == "[":
            yield from _array_rows(text)
        elif begin == "{":
            yield from _object_rows(text)
        else:
            raise BrokenOffError("bad_json", f"it is not JSON (object or array expected at {text.place()})")


def _array_rows(text: _Text) -> Iterator[Any]:
    """The items of an array, or the array if it is a conversation."""
    items = _items(text)
    for first in items:
        if is_message(first):
            parts = [first, *items]
            yield _broken(parts) or parts
        else:
            yield first
            yield from items


def _object_rows(text: _Text) -> Iterator[Any]:
    """The items of all arrays of rows directly below an object; the object itself if it has none."""
    row: dict[str, Any] = {}
    broken: Broken | None = None
    has_rows = False
    text.skip("{")
    while text.peek() != "}":
        key = text.value()
        if not isinstance(key, str):
            raise BrokenOffError("bad_json", f"it is not JSON (a name expected before {text.place()})")
        text.skip(":")
        if text.peek() == "[":
            parts: list[Any] = []
            items = _items(text)
            for first in items:
                if _is_row(first, key, row):
                    has_rows = True
                    yield first
                    yield from items
                else:
                    parts += [first, *items]
            row[key], broken = parts, broken or _broken(parts)
        else:
            row[key] = text.item()
            broken = broken or _broken([row[key]])
        if text.peek() != "}":
            text.skip(",")
    text.skip("}")
    if not has_rows:
        yield broken or row


def _is_row(item: Any, key: str, row: Mapping[str, Any]) -> bool:
    """Whether the first item of an array below `key`, in an object that begins with `row`, is a row."""
    if not isinstance(item, Mapping | Broken) or not _CHAT_FIELDS.isdisjoint(row):
        return False
    return key not in _ROW_FIELDS or not (key in TOOL_FIELDS or is_message(item))


def _items(text: _Text) -> Iterator[Any]:
    text.skip("[")
    while text.peek() != "]":
        yield text.item()
        if text.peek() != "]":
            text.skip(",")
    text.skip("]")


def _broken(parts: list[Any]) -> Broken | None:
    """What makes a row of these parts none."""
    return next((part for part in parts if isinstance(part, Broken)), None)


class _Text:
    """JSON text that is read as far as it is needed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text, self._at, self._before = "", 0, 0
        self._ended = False
        self._failed: BrokenOffError | None = None

    def place(self, at: int | None = None) -> str:
        """Where the text is, or where something in it is, in words."""
        return f"character {self._before + (self._at if at is None else at) + 1:,}"

    def peek(self) -> str:
        """The next character that is not blank, "" at the end."""
        while True:
            blank = _BLANK.match(self._text, self._at)
            assert blank is not None
            self._at = blank.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self, mark: str) -> None:
        """Moves behind a character that must come next.

        Raises:
            BrokenOffError: another one comes, or none.
        """
        found = self.peek()
        if not found:
            raise BrokenOffError("cut_off", "its JSON ends too early")
        if found != mark:
            raise BrokenOffError("bad_json", f"it is not JSON ({mark!r} expected at {self.place()})")
        self._at += 1

    def item(self) -> Any:
        """The value that comes next, `Broken` if there is text in it that is not UTF-8."""
        value, source = self._read()
        if source.isascii() or not _NO_UTF8.search(source):
            return value
        return Broken("not_utf8", f"is not text in UTF-8 (before {self.place()})")

    def value(self) -> Any:
        """The value that comes next."""
        return self._read()[0]

    def _read(self) -> tuple[Any, str]:
        """A value, and how it is written."""
        if not self.peek():
            raise BrokenOffError("cut_off", "its JSON ends too early")
        while True:
            try:
                value, end = _decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._may_go_on(error):
                    if len(self._text) - self._at > LONGEST_ROW:
                        raise BrokenOffError(
                            "bad_json", f"a row is longer than {LONGEST_ROW:,} characters"
                        ) from None
                    if self._more():
                        continue
                if self._ends_in(error):
                    raise BrokenOffError("cut_off", "its JSON ends too early") from None
                problem = f"{error.msg} at {self.place(error.pos)}"
                raise BrokenOffError("bad_json", f"it is not JSON ({problem})") from None
            except (ValueError, RecursionError) as error:
                problem = f"{_reason(error)} at {self.place()}"
                raise BrokenOffError("bad_json", f"it is not JSON ({problem})") from None
            if end < len(self._text) or self._text[end - 1] in '}]"' or not self._more():
                source = self._text[self._at : end]
                self._at = end
                return value, source

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        """Whether what failed may be the beginning of something whole."""
        return error.msg.startswith("Unterminated") or error.pos > len(self._text) - _TOKEN

    def _ends_in(self, error: json.JSONDecodeError) -> bool:
        """Whether what failed would be right if the file went on."""
        rest = self._text[error.pos :].strip()
        half_name = any(name.startswith(rest) for name in _NAMES)
        half_escape = error.msg.startswith("Invalid") and len(rest) < _ESCAPE
        return half_name or half_escape or error.msg.startswith("Unterminated")

    def _more(self) -> bool:
        """Reads on, at least as much as is still to be parsed, so that a long value is not begun too often.

        Raises:
            BrokenOffError: nothing more can be read though there is more.
        """
        if self._failed:
            raise self._failed
        if self._ended:
            return False
        size = max(_CHUNK, len(self._text) - self._at)
        pieces: list[bytes] = []
        while size > 0 and not self._failed and not self._ended:
            try:
                data = some(self._file)
            except BrokenOffError as error:
                self._failed = error
            else:
                pieces.append(data)
                size -= len(data)
                self._ended = not data
        self._before += self._at
        self._text = self._text[self._at :] + self._decoder.decode(b"".join(pieces), final=self._ended)
        self._at = 0
        return True
