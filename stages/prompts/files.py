"""Rows of prompt files, one at a time: JSON, Parquet, CSV, local or remote, also compressed."""

from __future__ import annotations

import codecs
import lzma
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast
from urllib.parse import urlsplit

from stages.artifacts.uri import filesystem, storage_errors
from stages.errors import EagleError
from stages.prompts.json_rows import json_lines, json_rows
from stages.prompts.packing import ENDINGS, is_zip, unpacked
from stages.prompts.prompt import Rejected
from stages.prompts.row import BrokenOffError, Row
from stages.prompts.streams import CHUNK, peeked, some, stream, utf8
from stages.prompts.tables import csv_rows, parquet_rows, tsv_rows
from stages.prompts.text import encodable, one_line
from stages.prompts.web import SCHEMES, open_web

_PARQUET = b"PAR1"
_HEAD = 512
_IN_MEMORY = 1 << 26
"""Bytes from which a file that must be read in any order is put on disk, if it is not there."""


@dataclass(frozen=True)
class _Reader:
    """How to read a type of file: `unit` is what its rows are called."""

    rows: Callable[[IO[bytes]], Iterator[tuple[int, Any]]]
    unit: str = "row"
    is_text: bool = True


_READERS = {
    ".jsonl": _Reader(json_lines, "line"),
    ".ndjson": _Reader(json_lines, "line"),
    ".json": _Reader(json_rows),
    ".parquet": _Reader(parquet_rows, is_text=False),
    ".csv": _Reader(csv_rows),
    ".tsv": _Reader(tsv_rows),
}
FILE_TYPES = tuple(_READERS)
ACCEPTED = f"{', '.join(FILE_TYPES)}, also with {', '.join(ENDINGS)} behind"


def is_prompt_file(src: str) -> bool:
    """Whether the name says that eagle can read it."""
    return _reader(src) is not None or _name(src).lower().endswith(".zip")


def expand(src: str) -> list[str]:
    """The files that a pattern with `*`, `?` or `[` names, sorted; `src` itself when it is no pattern.

    Raises:
        EagleError: nothing matches.
    """
    if not any(mark in src for mark in "*?[") or src.startswith(SCHEMES):
        return [src]
    fs, pattern = filesystem(src)
    with storage_errors(src):
        if fs.exists(pattern):
            return [src]
        found = fs.glob(pattern, detail=True)
    scheme = f"{src.split('://', 1)[0]}://" if "://" in src else ""
    files = [
        scheme + path.removeprefix(scheme)
        for path, about in sorted(found.items())
        if is_prompt_file(path) and about.get("type") != "directory"
    ]
    if not files:
        raise EagleError(f"no prompt file matches {src}: check the pattern, and quote it in the shell")
    return files


def file_rows(src: str) -> Iterator[Row]:
    """The rows of a file; where it breaks off, behind at least one row, is a rejected row.

    Raises:
        EagleError: it does not exist, cannot be read or is not what its name says.
    """
    with storage_errors(src), _opened(src) as file:
        yield from _rows(src, src, file, _reader(src))


@contextmanager
def _opened(src: str) -> Iterator[IO[bytes]]:
    if src.startswith(SCHEMES):
        with open_web(src) as file:
            yield file
        return
    fs, path = filesystem(src)
    if not fs.isfile(path):
        if fs.isdir(path):
            raise EagleError(f"{src} is a folder: give a pattern such as {src.rstrip('/')}/*.jsonl")
        if fs.exists(path):
            raise EagleError(f"{src} is no regular file: write the prompts to one first")
        raise EagleError(f"prompts {src} not found: check the path")
    with fs.open(path, "rb") as opened:
        yield opened


def _rows(name: str, where: str, file: IO[bytes], reader: _Reader | None) -> Iterator[Row]:
    """The rows of an open file, or of the files in it.

    Args:
        name: of the file, its last part becomes that of the rows.
        where: the file in words.
        reader: None if the name does not say how it is to be read.
    """
    head, whole = peeked(file, _HEAD)
    _refuse_others(head, where)
    if is_zip(head):
        with _seekable(file, whole, where) as archive:
            yield from _zipped(where, archive, reader)
    elif (inside := unpacked(head, whole)) is not None:
        yield from _rows(name, where, inside, reader)
    else:
        reader = reader or _guessed(head, where)
        if reader.is_text:
            yield from _read(name, where, utf8(whole), reader)
        else:
            with _seekable(file, whole, where) as table:
                yield from _read(name, where, table, reader)


def _read(name: str, where: str, file: IO[bytes], reader: _Reader) -> Iterator[Row]:
    name, number = _base(name), 0
    try:
        for number, value in reader.rows(file):
            yield Row(f"{name}:{number}", f"{where}, {reader.unit} {number}", value)
    except BrokenOffError as error:
        if not number:
            raise EagleError(f"{where} cannot be read: {error}") from None
        place = f"{where}, {reader.unit} {number + 1}"
        problem = Rejected(error.reason, place, f"is where the file breaks off: {error}")
        yield Row(f"{name}:{number + 1}", place, problem)


def _zipped(where: str, file: IO[bytes], reader: _Reader | None) -> Iterator[Row]:
    """The rows of all prompt files in an archive, or of its only file whatever that is called."""
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise EagleError(f"{where} cannot be unpacked ({error})") from None
    with archive:
        files = [each for each in archive.infolist() if not each.is_dir() and not _is_of_mac(each.filename)]
        named = [each for each in files if is_prompt_file(each.filename)]
        if not named and len(files) == 1 and reader:
            named = files
        if not named:
            raise EagleError(f"{where} has no prompt file in it: give one with files of {ACCEPTED}")
        for each in named:
            inside = f"{where}, {one_line(each.filename)}"
            with _member(archive, each, inside) as member:
                yield from _rows(each.filename, inside, member, _reader(each.filename) or reader)


@contextmanager
def _member(archive: zipfile.ZipFile, about: zipfile.ZipInfo, where: str) -> Iterator[IO[bytes]]:
    try:
        packed = archive.open(about)
    except (zipfile.BadZipFile, RuntimeError) as error:
        # Damaged; or packed in a way that zipfile lacks, or in need of a password, which are both the latter.
        raise EagleError(f"{where} cannot be unpacked ({one_line(error)})") from None

    def more() -> bytes:
        try:
            return some(packed)
        except (zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError) as error:
            raise BrokenOffError("cut_off", f"its zip data are damaged: {one_line(error)}") from None

    with packed:
        yield stream(more)


@contextmanager
def _seekable(file: IO[bytes], whole: IO[bytes], where: str) -> Iterator[IO[bytes]]:
    """A file to read in any order: `file` from its beginning, or a copy of `whole` where that cannot be."""
    if file.seekable():
        file.seek(0)
        yield file
        return
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as copy:
        try:
            shutil.copyfileobj(whole, copy, CHUNK)
        except BrokenOffError as error:
            raise EagleError(f"{where} cannot be read: {error}") from None
        copy.seek(0)
        yield cast(IO[bytes], copy)


def _guessed(head: bytes, where: str) -> _Reader:
    """How to read a file whose name does not say it."""
    if head.startswith(_PARQUET):
        return _READERS[".parquet"]
    if head.decode("utf-8", "ignore").lstrip("\ufeff \t\r\n")[:1] in ("{", "["):
        return _READERS[".json"]
    raise EagleError(f"{where} is no prompt file eagle can read: use {ACCEPTED}")


def _refuse_others(head: bytes, where: str) -> None:
    """Refuses what comes in place of a file that was not really downloaded."""
    begin = head.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if begin.startswith((b"<!doctype html", b"<html")):
        raise EagleError(f"{where} is a web page: give the address of a file with prompts, {ACCEPTED}")
    if begin.startswith(b"version https://git-lfs"):
        raise EagleError(f"{where} only says where Git LFS keeps the file: get it with git lfs pull")


def _name(src: str) -> str:
    return urlsplit(src).path if "://" in src else src


def _base(src: str) -> str:
    return one_line(encodable(_name(src).rstrip("/").rsplit("/", 1)[-1]))


def _reader(src: str) -> _Reader | None:
    name = _name(src).lower()
    name = next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)
    return next((reader for ending, reader in _READERS.items() if name.endswith(ending)), None)


def _is_of_mac(name: str) -> bool:
    return name.startswith("__MACOSX/") or name.rsplit("/", 1)[-1].startswith("._")
