"""A folder of whole files, local or in an object store.

Whatever interrupts a write, the file is then absent, old and whole, or new and whole.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from stages.artifacts.retry import retried
from stages.artifacts.uri import filesystem, join, local_path, storage_errors
from stages.errors import EagleError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

RUN_NAME = "_run.json"
"""In the folder of every artifact that is being written; see `run_record`."""

BLOCK_BYTES = 1 << 22
RANGE_BYTES = 1 << 25
_TEMPORARY = ".eagle-tmp"
_REQUESTS_AT_ONCE = 16
_LISTED_FROM = 64
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

_GCS_BOUNDARY = b"--==0=="
"""What gcsfs puts between the parts of a one-request upload; data that contains it would end there."""

_GCS_ONE_REQUEST = 5 << 20
"""Files up to this size gcsfs uploads in one request."""

_T = TypeVar("_T")
_R = TypeVar("_R")


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


def at_once(function: Callable[[_T], _R], values: Sequence[_T]) -> list[_R]:
    """`function` of each value, by several threads: most of a request to a store is waiting."""
    if len(values) < 2:
        return [function(value) for value in values]
    with ThreadPoolExecutor(min(_REQUESTS_AT_ONCE, len(values))) as pool:
        return list(pool.map(function, values))


class Folder(ABC):
    """Files by name below one URI. Names are relative, with slashes.

    Every method raises `EagleError` for what storage can fail with: no space, no permission, no network.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri

    @abstractmethod
    def below(self, name: str) -> Folder:
        """The folder of that name in this one."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Size of a file in bytes, None when there is none."""

    @abstractmethod
    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """`size` of each name."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """The content of a file, None when there is none."""

    @abstractmethod
    def read_each(self, names: Sequence[str]) -> list[bytes | None]:
        """`read` of each name."""

    @abstractmethod
    def read_range(self, name: str, start: int, stop: int) -> bytes | None:
        """Bytes `start` to `stop` of a file, fewer where it ends before; None when there is none."""

    @abstractmethod
    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        """The content of a file of that size, a few MB at a time; less or nothing when it is not there."""

    @abstractmethod
    def write(self, name: str, data: bytes | Path) -> None:
        """Makes or replaces a file as a whole; a local file given as a path is copied and stays."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Makes a file as a whole if there is none of that name; of several who try, one gets True.

        Args:
            data: what no other caller would write, so that it can be told whose the file is.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a file if it is there."""

    @abstractmethod
    def remove_each(self, names: Sequence[str]) -> None:
        """Removes files, in any order."""

    @abstractmethod
    def remove_tree(self, name: str) -> None:
        """Removes a folder with all that is in it; in an object store, all that a listing shows."""

    @abstractmethod
    def remove_empty(self, name: str) -> None:
        """Removes a folder and those around it, as far as they are empty; object stores have none such."""

    @abstractmethod
    def names(self) -> list[str]:
        """What is directly in the folder and no remnant of a killed write; [""] when the URI is a file.

        In an object store this is a listing: good for a warning, not for a decision that data depends on.
        """

    @abstractmethod
    def sweep(self) -> None:
        """Removes the remnants of killed writes; not below folders that have a run record of their own."""


def open_folder(uri: str) -> Folder:
    """The folder at a URI; nothing is created.

    Raises:
        EagleError: the URI cannot be opened.
    """
    local = local_path(uri)
    return ObjectFolder(uri) if local is None else LocalFolder(uri, local)


class LocalFolder(Folder):
    """Writes to a temporary file beside the final one, flushes it to disk, and renames it."""

    def __init__(self, uri: str, root: Path) -> None:
        super().__init__(uri)
        self.root = root

    def path(self, name: str) -> Path:
        return self.root / name

    def below(self, name: str) -> LocalFolder:
        return LocalFolder(join(self.uri, name), self.path(name))

    def size(self, name: str) -> int | None:
        with storage_errors(join(self.uri, name)):
            path = self.path(name)
            try:
                return path.stat().st_size if path.is_file() else None
            except (FileNotFoundError, NotADirectoryError):
                return None

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        return [self.size(name) for name in names]

    def read(self, name: str) -> bytes | None:
        with storage_errors(join(self.uri, name)):
            try:
                return self.path(name).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def read_each(self, names: Sequence[str]) -> list[bytes | None]:
        return [self.read(name) for name in names]

    def read_range(self, name: str, start: int, stop: int) -> bytes | None:
        with storage_errors(join(self.uri, name)):
            try:
                with self.path(name).open("rb") as file:
                    file.seek(start)
                    return file.read(stop - start)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        with storage_errors(join(self.uri, name)), suppress(FileNotFoundError):
            yield from local_blocks(self.path(name))

    def write(self, name: str, data: bytes | Path) -> None:
        final = self.path(name)
        with storage_errors(join(self.uri, name)), _written(final, data) as temporary:
            os.replace(temporary, final)
            _flush_folder(final.parent)

    def create(self, name: str, data: bytes) -> bool:
        final = self.path(name)
        with storage_errors(join(self.uri, name)):
            while (made := _linked(final, data)) is None:
                pass  # the owner of the folder has swept the temporary file away
            return made

    def remove(self, name: str) -> None:
        path = self.path(name)
        with storage_errors(join(self.uri, name)):
            try:
                path.unlink(missing_ok=True)
            except NotADirectoryError:
                return
            self._remove_empty(path.parent)

    def remove_each(self, names: Sequence[str]) -> None:
        for name in names:
            self.remove(name)

    def remove_tree(self, name: str) -> None:
        with storage_errors(join(self.uri, name)):
            for folder, _, files in os.walk(self.path(name), topdown=False):
                for file in files:
                    Path(folder, file).unlink(missing_ok=True)
                _remove_if_empty(Path(folder))
            self._remove_empty(self.path(name).parent)

    def remove_empty(self, name: str) -> None:
        with storage_errors(join(self.uri, name)):
            self._remove_empty(self.path(name))

    def _remove_empty(self, folder: Path) -> None:
        """Removes a folder and those around it, as far as they are empty and in this one."""
        while folder != self.root and _remove_if_empty(folder):
            folder = folder.parent

    def names(self) -> list[str]:
        with storage_errors(self.uri):
            try:
                names = sorted(entry.name for entry in os.scandir(self.root))
            except FileNotFoundError:
                return []
            except NotADirectoryError:
                return [""]
        return [name for name in names if not name.endswith(_TEMPORARY)]

    def sweep(self) -> None:
        with storage_errors(self.uri):
            for folder, folders, files in os.walk(self.root):
                folders[:] = [name for name in folders if not Path(folder, name, RUN_NAME).exists()]
                for file in files:
                    if file.endswith(_TEMPORARY):
                        Path(folder, file).unlink(missing_ok=True)


class ObjectFolder(Folder):
    """Uploads whole objects, which appear at once or not at all; needs no rename, append or listing."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._process = os.getpid()
        self._opened, path = filesystem(uri)
        self._path = path.rstrip("/")
        self._gcs = "gs" in _protocols(self._opened)

    @property
    def _fs(self) -> AbstractFileSystem:
        if self._process != os.getpid():  # after a fork the threads of the old one are gone
            self._opened, _ = filesystem(self.uri)
            self._process = os.getpid()
        return self._opened

    def _object(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _try(self, name: str, action: Callable[[str], _T]) -> _T | None:
        """What the action gives for the object, None where there is none; repeated while a store is busy."""

        def attempt() -> _T | None:
            try:
                return action(self._object(name))
            except (FileNotFoundError, NotADirectoryError):
                return None

        return retried(join(self.uri, name), attempt)

    def below(self, name: str) -> ObjectFolder:
        return ObjectFolder(join(self.uri, name))

    def size(self, name: str) -> int | None:
        info = self._try(name, self._fs.info)
        return None if info is None or info["type"] == "directory" else int(info["size"])

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        # What a listing shows is there. What it does not show may be there as well, so that is asked for.
        found = self._listed() if len(names) >= _LISTED_FROM else {}
        unseen = [name for name in names if name not in found]
        found.update(zip(unseen, at_once(self.size, unseen), strict=True))
        return [found[name] for name in names]

    def _listed(self) -> dict[str, int | None]:
        entries = retried(self.uri, lambda: self._fs.find(self._path, detail=True))
        root = self._fs._strip_protocol(self._path)
        return {path.removeprefix(root).strip("/"): int(entry["size"]) for path, entry in entries.items()}

    def read(self, name: str) -> bytes | None:
        return self._try(name, lambda path: bytes(self._fs.cat_file(path)))

    def read_each(self, names: Sequence[str]) -> list[bytes | None]:
        return at_once(self.read, names)

    def read_range(self, name: str, start: int, stop: int) -> bytes | None:
        if start == stop:
            return b""
        return self._try(name, lambda path: bytes(self._fs.cat_file(path, start=start, end=stop)))

    def blocks(self, name: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, RANGE_BYTES):
            stop = min(start + RANGE_BYTES, size)
            block = self.read_range(name, start, stop)
            if block is not None and len(block) < stop - start and self.size(name) == size:
                block = self.read_range(name, start, stop)  # it was cut off on its way
            if not block:
                return
            yield block

    def write(self, name: str, data: bytes | Path) -> None:
        retried(join(self.uri, name), lambda: self._upload(self._object(name), data))

    def create(self, name: str, data: bytes) -> bool:
        def attempt() -> None:
            # An attempt may have made the file without hearing of it, so the file itself says whose it is.
            with suppress(FileExistsError):
                self._upload(self._object(name), data, mode="create")

        try:
            retried(join(self.uri, name), attempt)
        except EagleError:
            if (there := self.read(name)) is None:  # else the store said in its own way that it exists
                raise
            return there == data
        return self.read(name) == data

    def remove(self, name: str) -> None:
        self._try(name, self._fs.rm_file)

    def remove_each(self, names: Sequence[str]) -> None:
        at_once(self.remove, names)

    def remove_tree(self, name: str) -> None:
        found = self._try(name, self._fs.find) or ()
        root = self._fs._strip_protocol(self._path)
        self.remove_each([str(path).removeprefix(root).strip("/") for path in found])

    def remove_empty(self, name: str) -> None:
        pass

    def names(self) -> list[str]:
        found = self._try("", lambda _: self._fs.ls(self._path, detail=False)) or ()
        root = self._fs._strip_protocol(self._path)
        relative = [str(name).removeprefix(root).strip("/") for name in found]
        if relative == [""] and self._fs.isfile(self._path):
            return [""]
        return sorted(name for name in relative if name)

    def sweep(self) -> None:
        """Nothing to do: an upload that was cut off leaves no object."""

    def _upload(self, path: str, data: bytes | Path, **options: Any) -> None:
        if self._gcs:
            # Objects that everyone may read are cached on their way by default: a reader would see old ones.
            options["fixed_key_metadata"] = {"cache_control": "no-store"}
            if isinstance(data, Path) and data.stat().st_size < _GCS_ONE_REQUEST:
                data = data.read_bytes()
            if isinstance(data, bytes) and _GCS_BOUNDARY in data:
                options["chunksize"] = min(len(data), _GCS_ONE_REQUEST)  # from this size on it goes in chunks
        if isinstance(data, Path):
            self._fs.put_file(str(data), path, **options)
        else:
            self._fs.pipe_file(path, data, **options)


def _protocols(fs: AbstractFileSystem) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


@contextmanager
def _written(final: Path, data: bytes | Path) -> Iterator[Path]:
    """A temporary file beside `final` with these data on disk; it goes again unless it is renamed."""
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}{_TEMPORARY}")
    try:
        while True:
            try:
                _write_through(temporary, data)
                break
            except (
                FileNotFoundError
            ):  # the first file of its folder, or another process just removed the last
                if isinstance(data, Path) and not data.exists():
                    raise
                temporary.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_through(path: Path, data: bytes | Path) -> None:
    with path.open("wb") as file:
        if isinstance(data, Path):
            with data.open("rb") as source:
                shutil.copyfileobj(source, file, BLOCK_BYTES)
        else:
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _linked(final: Path, data: bytes) -> bool | None:
    """Makes a file that was not there, whole from the start; None when the temporary file went missing."""
    with _written(final, data) as temporary:
        try:
            os.link(temporary, final)
            made = True
        except FileExistsError:
            made = False
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            made = _exclusive(final, data)
        temporary.unlink(missing_ok=True)
    _flush_folder(final.parent)
    return made


def _exclusive(path: Path, data: bytes) -> bool:
    """Makes a file where links are not to be had; a reader may see it unfinished."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return True


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
