"""Rows of prompt files, one at a time: JSON lines, JSON, Parquet, CSV, local or remote, also compressed."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any
from urllib.parse import urlsplit

from stages.artifacts.uri import filesystem, storage_errors
from stages.errors import EagleError
from stages.prompts.prompt import Rejected

Row = tuple[int, str, Any]
"""Number from 1, the place in words, and what is there: a value, or `Rejected`."""

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".zip": "zip"}
_PACKERS = ("bz2", "gzip", "lzma", "_lzma", "zipfile", "zlib", "zstd", "zstandard")
_PARQUET_ROWS = 1024
_BOM = b"\xef\xbb\xbf"


def is_prompt_file(src: str) -> bool:
    """Whether the name says that eagle can read it."""
    return _reader(src)[0] is not None


def expand(src: str) -> list[str]:
    """The files that a pattern with `*`, `?` or `[` names, sorted; `src` itself when it is no pattern.

    Raises:
        EagleError: nothing matches.
    """
    if not any(mark in src for mark in "*?[") or src.startswith(("http://", "https://")):
        return [src]
    fs, pattern = filesystem(src)
    with storage_errors(src):
        if fs.exists(pattern):
            return [src]
        found = sorted(str(path) for path in fs.glob(pattern))
    scheme = f"{src.split('://', 1)[0]}://" if "://" in src else ""
    files = [scheme + path.removeprefix(scheme) for path in found if is_prompt_file(path)]
    if not files:
        raise EagleError(f"no prompt file matches {src}: check the pattern, and quote it in the shell")
    return files


def file_rows(src: str) -> Iterator[Row]:
    """The rows of a file.

    Raises:
        EagleError: it does not exist, cannot be read or is not what its name says.
    """
    read, compression = _reader(src)
    assert read is not None
    fs, path = filesystem(src)
    if src.startswith(("http://", "https://")):
        path = src  # with its query
    with storage_errors(src):
        if not src.startswith(("http://", "https://")) and not fs.isfile(path):
            raise EagleError(f"prompts {src} not found: check the path")
        try:
            with fs.open(path, "rb", compression=compression) as file:
                # zstandard's own stream cannot be read by lines.
                yield from read(src, io.BufferedReader(file) if compression == "zstd" else file)
        except Exception as error:
            if type(error).__module__.split(".")[0] not in _PACKERS:
                raise
            raise EagleError(f"{src} cannot be unpacked ({_one_line(error)})") from None


def _reader(src: str) -> tuple[Callable[[str, IO[bytes]], Iterator[Row]] | None, str | None]:
    name = (urlsplit(src).path if "://" in src else src).lower()
    compression = None
    for ending, kind in COMPRESSIONS.items():
        if name.endswith(ending):
            name, compression = name.removesuffix(ending), kind
    return next((read for ending, read in _READERS.items() if name.endswith(ending)), None), compression


def _jsonl_rows(src: str, file: IO[bytes]) -> Iterator[Row]:
    # A binary file splits at b"\n" only. Splitting text would also break strings at U+2028 and its like.
    number = 0
    lines = iter(file)
    while True:
        number += 1
        where = f"{src}, line {number}"
        try:
            line = next(lines, None)
        except (EOFError, OSError) as error:
            if number == 1 or not _is_cut(error):
                raise
            yield number, where, Rejected("cut_off", where, "is where the compressed file ends too early")
            return
        if line is None:
            return
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            row = Rejected(
                "bad_json", where, f"is not JSON ({_one_line(error)}): each line must be one object"
            )
        yield number, where, row


def _is_cut(error: BaseException) -> bool:
    return isinstance(error, EOFError) or "end" in str(error).lower()


def _json_rows(src: str, file: IO[bytes]) -> Iterator[Row]:
    """The items of a JSON array, of the first array in an object, or of JSON lines under another name."""
    import ijson

    head = file.read(1 << 16)
    start = head.removeprefix(_BOM).lstrip()
    if not start:
        return
    if start[:1] == b"{" and _is_json_lines(start):
        yield from _jsonl_rows(src, _chained(head, file))
        return
    number = 0
    whole = _chained(head.removeprefix(_BOM), file)
    try:
        for row in ijson.items(whole, "item", use_float=True) if start[:1] == b"[" else _nested(whole):
            number += 1
            yield number, f"{src}, row {number}", row
    except (ijson.JSONError, UnicodeDecodeError, EOFError) as error:
        if not number:
            raise EagleError(f"{src} cannot be read as JSON ({_one_line(error)})") from None
        where = f"{src}, row {number + 1}"
        cut = isinstance(error, ijson.IncompleteJSONError | EOFError) and "lexical" not in str(error)
        problem = "is where the file ends too early" if cut else f"is not JSON ({_one_line(error)})"
        yield number + 1, where, Rejected("cut_off" if cut else "bad_json", where, problem)


def _is_json_lines(start: bytes) -> bool:
    line, newline, _ = start.partition(b"\n")
    try:
        return bool(newline) and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _nested(file: IO[bytes]) -> Iterator[Any]:
    """The items of the first array directly below the top of an object."""
    import ijson
    from ijson.common import ObjectBuilder

    within: str | None = None
    builder = None
    for prefix, event, value in ijson.parse(file, use_float=True):
        if within is None:
            if event == "start_array" and "." not in prefix:
                within = prefix
            continue
        if prefix == within and event == "end_array":
            return
        if prefix == f"{within}.item" and builder is None:
            builder = ObjectBuilder()
        assert builder is not None
        builder.event(event, value)
        if prefix == f"{within}.item" and event not in ("start_map", "start_array", "map_key"):
            yield builder.value
            builder = None


def _chained(head: bytes, rest: IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(_Chained(head, rest), 1 << 16)


class _Chained(io.RawIOBase):
    """A stream that begins with bytes already read from it."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        data = data or self._rest.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _parquet_rows(src: str, file: IO[bytes]) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=_PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield number, f"{src}, row {number}", row
    except pyarrow.ArrowException as error:
        raise EagleError(f"{src} cannot be read as Parquet ({_one_line(error)})") from None


def _csv_rows(src: str, file: IO[bytes], delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        for number, row in enumerate(csv.DictReader(text, delimiter=delimiter), start=1):
            row.pop(None, None)  # where csv puts what has no column
            yield number, f"{src}, row {number}", {key: value for key, value in row.items() if value != ""}
    except (csv.Error, UnicodeDecodeError) as error:
        raise EagleError(f"{src} cannot be read as CSV in UTF-8 ({_one_line(error)})") from None


def _tsv_rows(src: str, file: IO[bytes]) -> Iterator[Row]:
    return _csv_rows(src, file, delimiter="\t")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


_READERS: dict[str, Callable[[str, IO[bytes]], Iterator[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".ndjson": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".csv": _csv_rows,
    ".tsv": _tsv_rows,
}
FILE_TYPES = tuple(_READERS)
