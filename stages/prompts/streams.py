"""Streams of bytes for readers: in UTF-8, and looked at before they are read."""

from __future__ import annotations

import codecs
import io
from collections.abc import Callable
from typing import IO, Any

from stages.prompts.row import BrokenOffError

CHUNK = 1 << 16
_MARKS = (  # the longer ones first: UTF-16's is the beginning of one of UTF-32's
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class Stream(io.RawIOBase):
    """What a function gives piece by piece, b"" at the end, as a file that is read from first to last."""

    def __init__(self, more: Callable[[], bytes], head: bytes = b"") -> None:
        self._more, self._rest = more, memoryview(head)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(self._more())
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def stream(more: Callable[[], bytes], head: bytes = b"") -> io.BufferedReader:
    """A file of `head` and then what `more` gives until it gives nothing."""
    return io.BufferedReader(Stream(more, head), CHUNK)


def some(file: IO[bytes], size: int = CHUNK) -> bytes:
    """What can be had of the next `size` bytes before anything fails, b"" at the end.

    A plain read of many bytes that fails at the last of them loses all others.
    """
    read_some = getattr(file, "read1", file.read)
    data: bytes = read_some(size)
    return data


def peeked(file: IO[bytes], size: int) -> tuple[bytes, io.BufferedReader]:
    """The first `size` bytes of a file, fewer only if there are no more, and the whole file."""
    head = b""
    failed: list[BrokenOffError] = []
    while len(head) < size and not failed:
        try:
            found = some(file, size - len(head))
        except BrokenOffError as error:
            failed.append(error)
        else:
            head += found
            if not found:
                break

    def more() -> bytes:
        if failed:
            raise failed[0]
        return some(file)

    return head, stream(more, head)


def utf8(file: IO[bytes]) -> io.BufferedReader:
    """A text file in UTF-8 without a byte order mark, from one in the encoding that its mark says.

    What is no UTF-8 stays so, for the reader to find; what is no UTF-16 or UTF-32 becomes U+FFFD.
    """
    head, whole = peeked(file, 4)
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            whole.read(len(mark))
            return whole if encoding == "utf-8" else _recoded(whole, encoding)
    return whole


def _recoded(file: IO[bytes], encoding: str) -> io.BufferedReader:
    decoder = codecs.getincrementaldecoder(encoding)("replace")

    def more() -> bytes:
        while data := some(file):
            if text := decoder.decode(data):
                return text.encode()
        return decoder.decode(b"", final=True).encode()

    return stream(more)
