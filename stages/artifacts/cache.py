"""The folder for what can be made or fetched again: converted targets and local copies of remote files."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from stages.artifacts.folder import Folder, LocalFolder, ObjectFolder, measure
from stages.artifacts.manifest import STAGE_OF_KIND, Kind, Shard
from stages.artifacts.uri import join, storage_errors
from stages.errors import EagleError

_checked: set[tuple[str, str]] = set()


def cache_folder() -> Path:
    """`$EAGLE_CACHE`, or `~/.cache/eagle`. It may not exist yet."""
    return Path(os.path.expanduser(os.environ.get("EAGLE_CACHE") or "~/.cache/eagle"))


def local_copy(folder: Folder, entry: Shard, kind: Kind, key: str) -> Path:
    """A local file with the content of `entry`: the file itself when the folder is local, else a cached copy.

    The digest is compared once per file and process.

    Args:
        key: names the folder below the cache that holds the copies of this artifact.

    Raises:
        EagleError: the file is missing or is not what the manifest says, or cannot be fetched.
    """
    if isinstance(folder, LocalFolder):
        path = folder.path(entry.path)
        if (str(path), entry.sha256) not in _checked:
            check_entry(folder.uri, kind, entry, *_measured(folder, entry, kind))
            _checked.add((str(path), entry.sha256))
        return path
    assert isinstance(folder, ObjectFolder)
    path = cache_folder() / "artifacts" / key / entry.path
    if (str(path), entry.sha256) in _checked and path.is_file():
        return path
    if not (path.is_file() and measure(path) == (entry.bytes, entry.sha256)):
        _download(folder, entry, kind, path)
    _checked.add((str(path), entry.sha256))
    return path


def check_entry(uri: str, kind: Kind, entry: Shard, size: int, sha256: str | None = None) -> None:
    """Compares what was found with what the manifest says.

    Raises:
        EagleError: size or digest differ. `sha256` None means that only the size is known.
    """
    where = join(uri, entry.path)
    again = f"make the artifact again with eagle {STAGE_OF_KIND[kind]} --overwrite"
    if size < entry.bytes:
        raise EagleError(f"{where} is truncated ({size} of {entry.bytes} bytes): {again}")
    if size > entry.bytes:
        raise EagleError(f"{where} has {size} bytes and its manifest says {entry.bytes}: {again}")
    if sha256 is not None and sha256 != entry.sha256:
        raise EagleError(f"{where} does not match its digest, so its content has changed: {again}")


def missing_entry(uri: str, kind: Kind, entry: Shard) -> EagleError:
    """The error for a file that the manifest lists and the folder lacks."""
    again = f"make the artifact again with eagle {STAGE_OF_KIND[kind]} --overwrite"
    return EagleError(f"{join(uri, entry.path)} is missing: {again}")


def _measured(folder: Folder, entry: Shard, kind: Kind) -> tuple[int, str | None]:
    size = folder.size(entry.path)
    if size is None:
        raise missing_entry(folder.uri, kind, entry)
    if size != entry.bytes:
        return size, None
    return measure(folder.blocks(entry.path))


def _download(folder: ObjectFolder, entry: Shard, kind: Kind, path: Path) -> None:
    size = folder.size(entry.path)
    if size is None:
        raise missing_entry(folder.uri, kind, entry)
    check_entry(folder.uri, kind, entry, size)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with storage_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.download(entry.path, temporary)
            check_entry(folder.uri, kind, entry, *measure(temporary))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
