"""A folder of whole files, local or in an object store.

Whatever interrupts a write, the file is then absent, old and whole, or new and whole.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from stages.artifacts.uri import filesystem, join, local_path, storage_errors

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

BLOCK_BYTES = 1 << 22
_TEMPORARY = ".eagle-tmp"
_REQUESTS_AT_ONCE = 16


def measure(data: bytes | Path | Iterable[bytes]) -> tuple[int, str]:
    """Size in bytes and sha256 hex digest of a value, a local file, or blocks, read a block at a time."""
    if isinstance(data, bytes):
        return len(data), hashlib.sha256(data).hexdigest()
    digest, size = hashlib.sha256(), 0
    for block in local_blocks(data) if isinstance(data, Path) else data:
        digest.update(block)
        size += len(block)
    return size, digest.hexdigest()


def local_blocks(path: Path) -> Iterator[bytes]:
    """The content of a local file, a few MB at a time."""
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block


class Folder(ABC):
    """Files by name below one URI. Names are relative, with slashes.

    Every method raises `EagleError` for what storage can fail with: no space, no permission, no network.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Size of a file in bytes, None when there is none."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """`size` of each name."""
        return [self.size(name) for name in names]

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """The content of a file, None when there is none."""

    @abstractmethod
    def blocks(self, name: str) -> Iterator[bytes]:
        """The content of a file that exists, a few MB at a time."""

    @abstractmethod
    def write(self, name: str, data: bytes | Path) -> None:
        """Makes or replaces a file as a whole; a local file given as a path is copied and stays."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file if it is there."""

    @abstractmethod
    def first_name(self) -> str | None:
        """The name of something in the folder that no killed write left; None when it is empty or absent.

        "" when the URI is itself a file. In an object store this is a listing: good for a warning, not for a
        decision that data depends on.
        """

    @abstractmethod
    def sweep(self) -> None:
        """Removes the remnants of killed writes."""


def open_folder(uri: str) -> Folder:
    """The folder at a URI; nothing is created.

    Raises:
        EagleError: the URI cannot be opened.
    """
    local = local_path(uri)
    if local is not None:
        return LocalFolder(uri, local)
    fs, path = filesystem(uri)
    return ObjectFolder(uri, fs, path)


class LocalFolder(Folder):
    """Writes to a temporary file beside the final one, flushes it to disk, and renames it."""

    def __init__(self, uri: str, root: Path) -> None:
        super().__init__(uri)
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name

    def size(self, name: str) -> int | None:
        with storage_errors(join(self.uri, name)):
            path = self.path(name)
            try:
                return path.stat().st_size if path.is_file() else None
            except (FileNotFoundError, NotADirectoryError):
                return None

    def read(self, name: str) -> bytes | None:
        with storage_errors(join(self.uri, name)):
            try:
                return self.path(name).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def blocks(self, name: str) -> Iterator[bytes]:
        with storage_errors(join(self.uri, name)):
            yield from local_blocks(self.path(name))

    def write(self, name: str, data: bytes | Path) -> None:
        final = self.path(name)
        temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}{_TEMPORARY}")
        with storage_errors(join(self.uri, name)):
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                _write_through(temporary, data)
                os.replace(temporary, final)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _flush_folder(final.parent)

    def remove(self, name: str) -> None:
        path = self.path(name)
        with storage_errors(join(self.uri, name)):
            try:
                path.unlink(missing_ok=True)
            except NotADirectoryError:
                return
            for folder in path.parents:
                if folder == self.root or not _remove_if_empty(folder):
                    return

    def first_name(self) -> str | None:
        with storage_errors(self.uri):
            try:
                names = sorted(entry.name for entry in os.scandir(self.root))
            except FileNotFoundError:
                return None
            except NotADirectoryError:
                return ""
        return next((name for name in names if not name.endswith(_TEMPORARY)), None)

    def sweep(self) -> None:
        with storage_errors(self.uri):
            for path in self.root.rglob(f"*{_TEMPORARY}"):
                path.unlink(missing_ok=True)


class ObjectFolder(Folder):
    """Uploads whole objects, which appear at once or not at all; needs no rename, append or listing."""

    def __init__(self, uri: str, fs: AbstractFileSystem, path: str) -> None:
        super().__init__(uri)
        self._fs = fs
        self._path = path.rstrip("/")
        # Objects that other tools uploaded in parts have no MD5, and the digests in manifests say more.
        self._download_options = {"consistency": "none"} if "gs" in _protocols(fs) else {}

    def _object(self, name: str) -> str:
        return f"{self._path}/{name}"

    def size(self, name: str) -> int | None:
        with storage_errors(join(self.uri, name)):
            try:
                info = self._fs.info(self._object(name))
            except (FileNotFoundError, NotADirectoryError):
                return None
        return None if info["type"] == "directory" else int(info["size"])

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        # One request each, and most of a request is waiting.
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            return list(pool.map(self.size, names))

    def read(self, name: str) -> bytes | None:
        with storage_errors(join(self.uri, name)):
            try:
                return bytes(self._fs.cat_file(self._object(name)))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def blocks(self, name: str) -> Iterator[bytes]:
        with storage_errors(join(self.uri, name)), self._fs.open(self._object(name), "rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def download(self, name: str, path: Path) -> None:
        """Copies a file that exists to a local path."""
        with storage_errors(join(self.uri, name)):
            self._fs.get_file(self._object(name), str(path), **self._download_options)

    def write(self, name: str, data: bytes | Path) -> None:
        with storage_errors(join(self.uri, name)):
            if isinstance(data, Path):
                self._fs.put_file(str(data), self._object(name))
            else:
                self._fs.pipe_file(self._object(name), data)

    def remove(self, name: str) -> None:
        with storage_errors(join(self.uri, name)):
            try:
                self._fs.rm_file(self._object(name))
            except FileNotFoundError:
                return

    def first_name(self) -> str | None:
        with storage_errors(self.uri):
            try:
                names = self._fs.ls(self._path, detail=False)
            except FileNotFoundError:
                return None
        below = self._fs._strip_protocol(self._path)
        relative = [str(name).removeprefix(below).strip("/") for name in names]
        if relative == [""] and self._fs.isfile(self._path):
            return ""
        return next((name for name in relative if name), None)

    def sweep(self) -> None:
        """Nothing to do: an upload that was cut off leaves no object."""


def _protocols(fs: AbstractFileSystem) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _write_through(path: Path, data: bytes | Path) -> None:
    with path.open("wb") as file:
        if isinstance(data, Path):
            with data.open("rb") as source:
                shutil.copyfileobj(source, file, BLOCK_BYTES)
        else:
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_if_empty(path: Path) -> bool:
    """Whether the folder is gone."""
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
