"""Rows of tables: Parquet, and CSV with commas, semicolons or tabs."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import IO, Any

from stages.prompts.row import LONGEST_ROW, Broken, BrokenOffError

_BATCH = 1024
_NO_UTF8 = re.compile("[\udc80-\udcff]")


def parquet_rows(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """Number and fields of each row of a file that can be read in any order.

    Raises:
        BrokenOffError: behind the rows before it: it is no Parquet, or damaged.
    """
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=_BATCH):
            for row in _batch_rows(batch):
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and (type(error) is not OSError or error.errno is not None):
            raise  # of what the file lies on
        reason = " ".join(str(error).split())[:200]
        raise BrokenOffError("cut_off", f"it is not Parquet, or damaged ({reason})") from None


def _batch_rows(batch: Any) -> list[Any]:
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):  # of one cell: find it
        return [_cells(batch, i) for i in range(batch.num_rows)]


def _cells(batch: Any, row: int) -> dict[str, Any] | Broken:
    """One row, without the cells that Python has no value for, such as years beyond 9999."""
    cells = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            cells[name] = column[row].as_py()
        except UnicodeDecodeError:
            return Broken("not_utf8", "has a text that is not UTF-8")
        except (ValueError, OverflowError):
            cells[name] = None
    return cells


def csv_rows(file: IO[bytes], delimiters: str = ",;\t") -> Iterator[tuple[int, Any]]:
    """Number and fields of each row below the first, which has their names; empty cells are left out.

    Args:
        delimiters: the first one that the first line has is taken.

    Raises:
        BrokenOffError: behind the rows before it: the file ends within quotes.
    """
    csv.field_size_limit(LONGEST_ROW)
    lines = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")
    head = lines.readline()
    names, reader = _header(head, lines, next((mark for mark in delimiters if mark in head), delimiters[0]))
    number = 0
    while True:
        number += 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise BrokenOffError("cut_off", "it ends within quotes") from None
            yield number, Broken("bad_csv", f"is no row of CSV ({error})")
            continue
        if cells is None:
            return
        if cells:
            yield number, _fields(names, cells)
        else:
            number -= 1


def tsv_rows(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """As `csv_rows`, with tabs."""
    yield from csv_rows(file, "\t,;")


def _header(head: str, lines: Any, delimiter: str) -> tuple[list[str], Any]:
    """The names of the columns, and what reads the rows below."""
    reader = csv.reader(_after(head, lines), delimiter=delimiter, strict=True)
    try:
        return [name.strip() for name in next(reader, [])], reader
    except csv.Error as error:
        raise BrokenOffError("bad_csv", f"its first line is no row of CSV ({error})") from None


def _after(head: str, lines: Any) -> Iterator[str]:
    yield head
    yield from lines


def _fields(names: list[str], cells: list[str]) -> dict[str, str] | Broken:
    if any(cells[len(names) :]):
        return Broken(
            "bad_csv",
            f"has {len(cells):,} cells for {len(names):,} columns: quote texts that have commas",
        )
    if any(not cell.isascii() and _NO_UTF8.search(cell) for cell in cells):
        return Broken("not_utf8", "is not text in UTF-8")
    return {name: cell for name, cell in zip(names, cells, strict=False) if cell != ""}
