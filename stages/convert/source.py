"""The folder that another tool wrote, local or remote: its files by name, and their content in order."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from stages.artifacts import filesystem, join
from stages.artifacts.uri import storage_errors
from stages.errors import EagleError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

READ_AHEAD = 4
"""Files read while the one before them is worked on, each in memory as a whole."""


@dataclass(frozen=True)
class Source:
    """A folder with the sizes of all files below it, listed once."""

    uri: str
    sizes: dict[str, int]  # by path relative to the folder
    fs: AbstractFileSystem
    root: str

    def digest(self, names: Sequence[str], telling: Sequence[str]) -> str:
        """sha256 over names and sizes of files, and the content of a few that tell files made anew."""
        digest = hashlib.sha256("".join(f"{name} {self.sizes[name]}\n" for name in names).encode())
        for name in telling:
            digest.update(self.read(name))
        return digest.hexdigest()

    def read(self, name: str) -> bytes:
        """Raises EagleError: it is not there, or the storage fails."""
        with storage_errors(join(self.uri, name)):
            data: bytes = self.fs.cat_file(f"{self.root}/{name}")
            return data

    def stream(self, name: str) -> IO[bytes]:
        """A file to read from front to back; the caller closes it."""
        with storage_errors(join(self.uri, name)):
            file: IO[bytes] = self.fs.open(f"{self.root}/{name}", "rb")
            return file

    def read_in_order(self, names: Sequence[str]) -> Iterator[bytes]:
        """The content of each file in turn, the next few being read meanwhile."""
        with ThreadPoolExecutor(READ_AHEAD) as readers:
            waiting: deque[Future[bytes]] = deque()
            try:
                for name in names:
                    waiting.append(readers.submit(self.read, name))
                    if len(waiting) > READ_AHEAD:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


def open_source(uri: str) -> Source:
    """Lists the folder.

    Raises:
        EagleError: there is no such folder, nothing in it, or the storage fails.
    """
    fs, path = filesystem(uri)
    root = path.rstrip("/")
    with storage_errors(uri):
        listed = fs.find(root, detail=True)
    sizes = {
        name.removeprefix(root).lstrip("/"): int(entry["size"] or 0)
        for name, entry in listed.items()
        if entry["type"] == "file"
    }
    if "" in sizes:
        raise EagleError(f"{uri} is a file: give the folder it is in")
    if not sizes:
        what = "has no files in it" if fs.exists(root) else "does not exist"
        raise EagleError(f"{uri} {what}: check the path")
    return Source(uri, sizes, fs, root)
