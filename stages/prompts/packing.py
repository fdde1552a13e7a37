"""Compressed files, known by their first bytes and not by their names, which may lie."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Any, Protocol

from stages.prompts.row import BrokenOffError
from stages.prompts.streams import some, stream

ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".zip")
_CHUNK = 1 << 14  # small, since it may unpack to thousands of times as much


class _Unpacker(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _zstd() -> _Unpacker:
    import zstandard

    unpacker: Any = zstandard.ZstdDecompressor().decompressobj()
    return unpacker


_MAGIC: tuple[tuple[bytes, str, Callable[[], _Unpacker]], ...] = (
    (b"\x1f\x8b", "gzip", lambda: zlib.decompressobj(wbits=31)),
    (b"BZh", "bzip2", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\x00", "xz", lzma.LZMADecompressor),
    (b"\x28\xb5\x2f\xfd", "zstd", _zstd),
)


def is_zip(head: bytes) -> bool:
    """Whether a file with these first bytes is a zip archive, be it an empty one."""
    return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))


def unpacked(head: bytes, file: IO[bytes]) -> io.BufferedReader | None:
    """What a compressed file contains, all its members one after the other; None if it is not compressed.

    Reading it raises `BrokenOffError` where the file ends early, is damaged, or goes on as something else.

    Args:
        head: its first bytes, which `file` gives again.
    """
    for magic, name, new in _MAGIC:
        if head.startswith(magic):
            return stream(_Unpacked(file, magic, name, new).more)
    return None


class _Unpacked:
    def __init__(self, file: IO[bytes], magic: bytes, name: str, new: Callable[[], _Unpacker]) -> None:
        self._file, self._magic, self._name, self._new = file, magic, name, new
        self._unpacker = new()

    def more(self) -> bytes:
        """The next piece, b"" at the end."""
        while True:
            if self._unpacker.eof:
                data = self._next_member(self._unpacker.unused_data)
                if not data:
                    return b""
                self._unpacker = self._new()
            else:
                data = some(self._file, _CHUNK)
                if not data:
                    raise BrokenOffError("cut_off", f"its {self._name} data end too early")
            try:
                found = self._unpacker.decompress(data)
            except Exception as error:  # each package raises its own
                reason = " ".join(str(error).split())[:200]
                raise BrokenOffError("cut_off", f"its {self._name} data are damaged: {reason}") from None
            if found:
                return found

    def _next_member(self, data: bytes) -> bytes:
        """The beginning of the next member, b"" if only padding is left."""
        while not (rest := data.lstrip(b"\0")) or len(rest) < len(self._magic):
            more = some(self._file, _CHUNK)
            if not more:
                break
            data = rest + more
        if rest and not rest.startswith(self._magic):
            raise BrokenOffError("cut_off", f"its {self._name} data are followed by something else")
        return rest
