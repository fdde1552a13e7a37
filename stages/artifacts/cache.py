"""The folder for what can be made or fetched again: converted targets and local copies of remote files.

A copy lies in `artifacts/files` under the sha256 of its content, whatever artifact it is of.
`artifacts/trees` has hard links to copies under the names they have in their artifact, for libraries that
open folders. Together they stay within a bound: the copies that were used longest ago go first, but none
that a process holds.

To hold a copy is to have it open with a shared lock (flock); to fetch or evict it takes an exclusive one.
The lock is on the file itself, so whoever gets it looks whether the file still has its name. Several
processes may use one cache, and a killed one leaves nothing held.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from stages.artifacts.file_lock import has_name, lock_exclusive, lock_shared, share, unlock
from stages.artifacts.folder import Folder, LocalFolder, at_once, measure
from stages.artifacts.manifest import STAGE_OF_KIND, Kind, Manifest, Shard
from stages.artifacts.uri import free_bytes, join, storage_errors
from stages.config import several
from stages.errors import EagleError

_DEFAULT_GB = 50.0
_PART = ".part"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)

T = TypeVar("T")

_compared: set[tuple[int, int, int, int, str]] = set()
"""Files whose digest this process has compared: device, inode, size, time of change, and the digest."""


def cache_folder() -> Path:
    """`$EAGLE_CACHE`, or `~/.cache/eagle`. It may not exist yet."""
    return Path(os.path.expanduser(os.environ.get("EAGLE_CACHE") or "~/.cache/eagle"))


def cache_limit() -> int:
    """Most bytes that copies may take: `$EAGLE_CACHE_GB` or 50 GB, and no more than half of what they could.

    Raises:
        EagleError: the variable is no number.
    """
    return _limit(sum(copy.bytes for copy in _copies()))


class Held:
    """A local file or folder that stays until it is released. As a context, it gives the path."""

    def __init__(self, path: Path, descriptors: Sequence[int] = ()) -> None:
        self.path = path
        self._descriptors = list(descriptors)

    @property
    def bytes(self) -> int:
        """Size of what is held in the cache; 0 for what is no copy."""
        return sum(os.fstat(descriptor).st_size for descriptor in self._descriptors)

    def release(self) -> None:
        """Lets the cache evict it; nothing when done again."""
        # Closed and not unlocked: a forked process shares the lock and may still need it.
        while self._descriptors:
            os.close(self._descriptors.pop())

    def keep_a_while(self) -> Path:
        """The path, held until others of half the cache's size have been kept like this since."""
        if self._descriptors:
            _kept.add(self)
        return self.path

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def hold(folder: Folder, entry: Shard, kind: Kind, *, compare: bool = True) -> Held:
    """A local file with the content of `entry`: the file itself when the folder is local, else a copy.

    Args:
        compare: whether its digest is compared, once per file and process; else only its size.

    Raises:
        EagleError: the file is missing or is not what the manifest says, or cannot be fetched.
    """
    if isinstance(folder, LocalFolder):
        _check_local(folder, entry, kind, compare)
        return Held(folder.path(entry.path))
    path = _copy_path(entry)
    with storage_errors(str(path)):
        while (held := _cached(entry, compare)) is None:
            if (held := _fetch(folder, entry, kind, path, compare)) is not None:
                break
        return held


def hold_cached(folder: Folder, entry: Shard) -> Held | None:
    """A copy that is there already, without comparing its digest; None where there is none or need not be."""
    if isinstance(folder, LocalFolder):
        return None
    with storage_errors(str(_copy_path(entry))):
        return _cached(entry, compare=False)


def hold_tree(
    folder: Folder, manifest: Manifest, entries: Sequence[Shard], prefix: str, compared: Collection[str]
) -> Held:
    """A local folder with the content of these entries, which lie below `prefix` ("" or ending in "/").

    Raises:
        EagleError: as `hold`.
    """

    def get(entry: Shard) -> Held:
        return hold(folder, entry, manifest.kind, compare=entry.path in compared)

    if isinstance(folder, LocalFolder):
        at_once(get, entries)
        return Held(folder.path(prefix))
    root = _artifacts() / "trees" / manifest.digest
    descriptors: list[int] = []
    with storage_errors(str(root)):
        for entry, held in zip(entries, at_once(get, entries), strict=True):
            descriptors.append(_link(held, root / entry.path))
    return Held(root / prefix, descriptors)


def check_entry(uri: str, kind: Kind, entry: Shard, size: int, sha256: str | None = None) -> None:
    """Compares what was found with what the manifest says.

    Raises:
        EagleError: size or digest differ. `sha256` None means that only the size is known.
    """
    where = join(uri, entry.path)
    again = f"make the artifact again with eagle {STAGE_OF_KIND[kind]} --overwrite"
    if size < entry.bytes:
        raise EagleError(f"{where} is truncated ({size} of {several(entry.bytes, 'byte')}): {again}")
    if size > entry.bytes:
        raise EagleError(f"{where} has {several(size, 'byte')} and its manifest says {entry.bytes}: {again}")
    if sha256 is not None and sha256 != entry.sha256:
        raise EagleError(f"{where} does not match its digest, so its content has changed: {again}")


def missing_entry(uri: str, kind: Kind, entry: Shard) -> EagleError:
    """The error for a file that the manifest lists and the folder lacks."""
    again = f"make the artifact again with eagle {STAGE_OF_KIND[kind]} --overwrite"
    return EagleError(f"{join(uri, entry.path)} is missing: {again}")


def twice(read: Callable[[], T]) -> T:
    """What `read` gives, after a second try where it is wrong: the way here may have changed it.

    Raises:
        EagleError: it fails, or is wrong both times.
    """
    try:
        return read()
    except EagleError as error:
        if error.__cause__ is not None:  # no answer, rather than a wrong one
            raise
        return read()


class _Kept:
    """What was handed out without anyone saying when it is done with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[Path, tuple[Held, int]] = OrderedDict()

    def add(self, held: Held) -> None:
        size, most = held.bytes, cache_limit() // 2
        with self._lock:
            self._held.pop(held.path, None)
            self._held[held.path] = held, size
            total = sum(size for _, size in self._held.values())
            while total > most and len(self._held) > 1:
                _, (oldest, size) = self._held.popitem(last=False)
                total -= size
                oldest.release()


_kept = _Kept()


def _forget_kept() -> None:
    global _kept
    _kept = _Kept()


os.register_at_fork(after_in_child=_forget_kept)  # its lock may be held by a thread that the child lacks


@dataclass
class _Copy:
    """One content in the cache, under all the names that it has there."""

    bytes: int
    used: int
    paths: list[Path] = field(default_factory=list)


def _artifacts() -> Path:
    return cache_folder() / "artifacts"


def _copy_path(entry: Shard) -> Path:
    return _artifacts() / "files" / (entry.sha256 + Path(entry.path).suffix)


def _limit(used: int) -> int:
    text = os.environ.get("EAGLE_CACHE_GB") or str(_DEFAULT_GB)
    try:
        most = round(float(text) * 1e9)
    except (ValueError, OverflowError):
        raise EagleError(f"EAGLE_CACHE_GB is {text!r}: give a number of gigabytes, such as 20") from None
    room = (free_bytes(str(cache_folder())) or 0) + used
    return max(0, min(most, room // 2))


def _copies() -> list[_Copy]:
    """What the cache holds, and what is being fetched into it with the size it will have."""
    found: dict[tuple[int, int], _Copy] = {}
    for folder, _, names in os.walk(_artifacts()):
        for name in names:
            path = Path(folder, name)
            with suppress(FileNotFoundError):
                status = path.lstat()
                copy = found.setdefault(
                    (status.st_dev, status.st_ino), _Copy(status.st_size, status.st_atime_ns)
                )
                copy.paths.append(path)
    return list(found.values())


def _check_local(folder: LocalFolder, entry: Shard, kind: Kind, compare: bool) -> None:
    size = folder.size(entry.path)
    if size is None:
        raise missing_entry(folder.uri, kind, entry)
    check_entry(folder.uri, kind, entry, size)
    with storage_errors(join(folder.uri, entry.path)):
        identity = _identity(folder.path(entry.path).stat(), entry)
    if compare and identity not in _compared:
        check_entry(folder.uri, kind, entry, *measure(folder.blocks(entry.path, size)))
        _compared.add(identity)


def _identity(status: os.stat_result, entry: Shard) -> tuple[int, int, int, int, str]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, entry.sha256


def _cached(entry: Shard, compare: bool) -> Held | None:
    """The copy, held; None when there is none. One that is damaged is removed."""
    path = _copy_path(entry)
    descriptor = lock_shared(path)
    if descriptor is None:
        return None
    held = Held(path, [descriptor])
    identity = _identity(os.fstat(descriptor), entry)
    whole = identity[2] == entry.bytes
    if whole and compare and identity not in _compared:
        whole = measure(path) == (entry.bytes, entry.sha256)
    if not whole:
        path.unlink(missing_ok=True)
        return None
    if compare:
        _compared.add(identity)
    os.utime(descriptor, ns=(time.time_ns(), identity[3]))
    return held


def _fetch(folder: Folder, entry: Shard, kind: Kind, path: Path, compare: bool) -> Held | None:
    """Fetches the copy; None when another has done so, or has come in between."""
    part = path.with_name(path.name + _PART)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = lock_exclusive(part, wait=False)
    if descriptor is None:  # another fetches it; its lock is shared once it is done
        if (done := lock_shared(part)) is not None:
            os.close(done)
        return None
    try:
        if not has_name(descriptor, part):
            return None
        if path.exists():
            part.unlink(missing_ok=True)
            return None
        try:
            _reserve(descriptor, entry)
            twice(lambda: _download(folder, entry, kind, descriptor, compare))
            with _accounts():  # who counts the copies in this moment might find neither name
                os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        if compare:
            _compared.add(_identity(os.fstat(descriptor), entry))
        share(descriptor)
        held = Held(path, [os.dup(descriptor)])
        return held if has_name(descriptor, path) else None  # evicted in the moment between the two locks
    finally:
        unlock(descriptor)


def _download(folder: Folder, entry: Shard, kind: Kind, descriptor: int, compare: bool) -> None:
    """Fills a file of the right size.

    Raises:
        EagleError: the content is missing, or not what the manifest says.
    """
    digest, size = hashlib.sha256(), 0
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "wb", closefd=False) as file:
        for block in folder.blocks(entry.path, entry.bytes):
            file.write(block)
            size += len(block)
            if compare:
                digest.update(block)
    if size != entry.bytes or not size:
        there = folder.size(entry.path)
        if there is None:
            raise missing_entry(folder.uri, kind, entry)
        check_entry(folder.uri, kind, entry, there)
    check_entry(folder.uri, kind, entry, size, digest.hexdigest() if compare else None)


def _reserve(descriptor: int, entry: Shard) -> None:
    """Evicts what has to go for a file, and gives it its size, so that others that look for room count it.

    Raises:
        EagleError: the disk has no room for it even so.
    """
    with _accounts():
        copies = sorted(_copies(), key=lambda copy: copy.used)
        used = sum(copy.bytes for copy in copies)
        most = _limit(used) - entry.bytes
        for copy in copies:
            if used <= most:
                break
            if _evict(copy):
                used -= copy.bytes
        free = free_bytes(str(cache_folder()))
        if free is not None and free < entry.bytes:
            raise EagleError(
                f"no space left in the cache {cache_folder()} for {entry.path} ({entry.bytes} bytes, "
                f"{free} free): free some, or set EAGLE_CACHE to a folder on a larger disk"
            )
        os.ftruncate(descriptor, entry.bytes)


@contextmanager
def _accounts() -> Iterator[None]:
    """One process at a time looks for room."""
    descriptor = lock_exclusive(_artifacts() / ".lock", wait=True)
    assert descriptor is not None
    try:
        yield
    finally:
        unlock(descriptor)


def _evict(copy: _Copy) -> bool:
    """Removes a copy under all its names, unless a process holds it."""
    try:
        descriptor = lock_exclusive(copy.paths[0], wait=False, make=False)
    except FileNotFoundError:
        return False
    if descriptor is None:
        return False
    try:
        for path in copy.paths:
            if has_name(descriptor, path):
                path.unlink(missing_ok=True)
                _remove_empty_tree(path.parent)
    finally:
        unlock(descriptor)
    return True


def _remove_empty_tree(folder: Path) -> None:
    with suppress(OSError):  # as soon as one is not empty
        while folder not in (_artifacts(), _artifacts() / "files"):
            folder.rmdir()
            folder = folder.parent


def _link(held: Held, path: Path) -> int:
    """Gives a copy another name, and passes its lock on."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    (descriptor,) = held._descriptors
    while not has_name(descriptor, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with suppress(FileNotFoundError):  # the folder, just empty, was removed
                os.link(held.path, temporary)
                os.replace(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            shutil.copyfile(held.path, temporary)
            os.replace(temporary, path)
            if (copied := lock_shared(path)) is not None:
                held.release()
                return copied
        finally:
            temporary.unlink(missing_ok=True)
    held._descriptors.clear()
    return descriptor
