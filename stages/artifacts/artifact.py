"""Reading a finished artifact: whole files with their digests checked, ranges, and local copies."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from stages.artifacts.cache import Held, check_entry, hold, hold_cached, hold_tree, missing_entry, twice
from stages.artifacts.folder import RUN_NAME, Folder, LocalFolder, measure, open_folder
from stages.artifacts.manifest import (
    MANIFEST_NAME,
    STAGE_OF_KIND,
    Kind,
    Manifest,
    Parent,
    Shard,
    TargetFingerprint,
    parse_manifest,
)
from stages.artifacts.prefetch import Prefetch
from stages.artifacts.run_record import read_run
from stages.config import several
from stages.errors import EagleError

Verify = Literal["full", "sample", "off"]

_SAMPLED = 16
_LOOKED_INTO = 32
_CHECKED_AT_ONCE = 4


class Artifact:
    """A finished artifact. Get one from `open_artifact`. It can be pickled, and used by several threads.

    Attributes:
        uri: where it is, as the user typed it.
        manifest: what it is.
    """

    def __init__(self, folder: Folder, manifest: Manifest, verify: Verify = "full") -> None:
        self.uri = folder.uri
        self.manifest = manifest
        self._folder = folder
        self._verify: Verify = verify
        self._entries = {entry.path: entry for entry in (*manifest.shards, *manifest.files)}
        self._compared = _compared(manifest, verify)
        self._prefetch = Prefetch(_fetching(folder, manifest.kind, self._entries, self._compared))
        weakref.finalize(self, self._prefetch.close)

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.uri, self.manifest, self._verify)

    def parent(self) -> Parent:
        """This artifact as an input of another."""
        return Parent(uri=self.uri, kind=self.manifest.kind, digest=self.manifest.digest)

    def read(self, path: str) -> bytes:
        """The content of a file, compared with its digest.

        Raises:
            EagleError: there is no such file, or it is truncated or changed.
        """
        entry = self._entry(path)
        if self._prefetch.wanted(path):
            with self.pinned(path) as copy:
                return copy.read_bytes()
        return twice(lambda: self._read(entry))

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` (not included) of a file, without comparing its digest.

        Raises:
            EagleError: there is no such file, or it is truncated.
            ValueError: the range is not within the file's size.
        """
        entry = self._entry(path)
        if not 0 <= start <= stop <= entry.bytes:
            raise ValueError(f"{path} has {entry.bytes} bytes; {start} to {stop} is not within them")
        if (held := hold_cached(self._folder, entry)) is not None:
            with held as copy, copy.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        data = self._folder.read_range(path, start, stop)
        if data is None:
            raise missing_entry(self.uri, self.manifest.kind, entry)
        if len(data) != stop - start:
            check_entry(self.uri, self.manifest.kind, entry, start + len(data))
        return data

    def local(self, path: str) -> Path:
        """A local path with the content of a file, or with the files below a folder of the artifact.

        The file itself where the artifact is local; else a copy in the cache folder, fetched once. A copy may
        leave the cache again once `local` has handed out others of half the cache's size since; `pinned`
        keeps one for longer.

        Args:
            path: a file or folder of the artifact; "." is the artifact itself.

        Raises:
            EagleError: there is nothing of that name, or a file is truncated or changed or cannot be fetched.
        """
        return self.pinned(path).keep_a_while()

    def pinned(self, path: str) -> Held:
        """As `local`, for as long as it is needed: `with artifact.pinned(path) as file:`, or `release()`.

        The cache does not evict it, in this process or another, until it is released.
        """
        if path in self._entries:
            return self._prefetch.take(path)
        prefix = "" if path == "." else path.rstrip("/") + "/"
        below = [entry for name, entry in self._entries.items() if name.startswith(prefix)]
        if not below:
            raise self._no_such(path)
        return hold_tree(self._folder, self.manifest, below, prefix, self._compared)

    def prefetch(self, paths: Sequence[str]) -> None:
        """Begins to fetch these files, in order, in the background, and returns at once.

        `local` and `pinned` take what is there and wait for what is on its way. Fetching stops while half of
        the cache holds files that were fetched and not yet taken. A later call replaces the list: what is in
        it no longer is not fetched, or not kept. An error is raised by the `local` of its file.
        """
        for path in paths:
            self._entry(path)
        if not isinstance(self._folder, LocalFolder):
            self._prefetch.want(paths, {path: self._entries[path].bytes for path in paths})

    def verify_all(self) -> Iterator[tuple[Shard, str | None]]:
        """Reads every file and compares its digest, whatever `verify` says.

        Returns:
            each shard and file in the manifest's order, with what is wrong with it in one line, or None.
        """
        with ThreadPoolExecutor(_CHECKED_AT_ONCE) as pool:
            yield from zip(self._entries.values(), pool.map(self._fault, self._entries.values()), strict=True)

    def require_target(
        self, fingerprint: TargetFingerprint, what: str = "the target", *, ignore: Collection[str] = ()
    ) -> None:
        """Refuses a target other than the one this artifact was made for.

        Args:
            what: how to call the thing the fingerprint belongs to, such as "--target".
            ignore: parts that may differ, such as "dtype".

        Raises:
            EagleError: parts of the fingerprints differ, or the artifact names no target.
        """
        made_for = self.manifest.target
        again = f"make it again with eagle {STAGE_OF_KIND[self.manifest.kind]}"
        if made_for is None:
            raise EagleError(f"{self.uri} does not say for which target it was made: {again}")
        parts = [part for part in made_for.mismatch(fingerprint) if part not in ignore]
        if parts:
            raise EagleError(
                f"{self.uri} was made for {made_for.name}, and {what} {fingerprint.name} differs in "
                f"{', '.join(parts)}: use the target it was made for, or {again}"
            )

    def _read(self, entry: Shard) -> bytes:
        data = self._folder.read(entry.path)
        if data is None:
            raise missing_entry(self.uri, self.manifest.kind, entry)
        size, sha256 = measure(data) if entry.path in self._compared else (len(data), None)
        check_entry(self.uri, self.manifest.kind, entry, size, sha256)
        return data

    def _fault(self, entry: Shard) -> str | None:
        try:
            size = self._folder.size(entry.path)
            if size is None:
                raise missing_entry(self.uri, self.manifest.kind, entry)
            check_entry(self.uri, self.manifest.kind, entry, size)
            found = measure(self._folder.blocks(entry.path, entry.bytes))
            check_entry(self.uri, self.manifest.kind, entry, *found)
        except EagleError as error:
            return str(error)
        return None

    def _entry(self, path: str) -> Shard:
        if path not in self._entries:
            raise self._no_such(path)
        return self._entries[path]

    def _no_such(self, path: str) -> EagleError:
        again = f"make the artifact again with eagle {STAGE_OF_KIND[self.manifest.kind]} --overwrite"
        return EagleError(f"{self.uri} has no file {path}: {again}")


def open_artifact(uri: str, kind: Kind | None, verify: Verify = "full") -> Artifact:
    """Opens a finished artifact for reading. Every file must be there with its size.

    Args:
        kind: what it has to be; None when any kind will do.
        verify: which files have their digests compared when they are read: all ("full"), one in 16 and at
            least one, chosen by digest ("sample"), or none ("off").

    Raises:
        EagleError: there is no finished artifact, it is of another kind or a newer schema, or files are
            missing or truncated.
    """
    folder = open_folder(uri)
    data = folder.read(MANIFEST_NAME)
    if data is None:
        raise _no_manifest(folder, kind)
    manifest = parse_manifest(data, uri)
    if kind is not None and manifest.kind != kind:
        raise EagleError(
            f"{uri} is a {manifest.kind} artifact where {kind} is needed: "
            f"give one that eagle {STAGE_OF_KIND[kind]} made"
        )
    _check_sizes(folder, manifest)
    return Artifact(folder, manifest, verify)


def artifact_state(uri: str) -> Literal["missing", "partial", "complete"]:
    """Whether there is a finished artifact, an unfinished one, or none.

    Raises:
        EagleError: the URI cannot be opened.
    """
    folder = open_folder(uri)
    begun = (
        folder.size(RUN_NAME) is not None
    )  # looked at first, since it goes only after the manifest has come
    if folder.size(MANIFEST_NAME) is not None:
        return "complete"
    return "partial" if begun else "missing"


def _fetching(
    folder: Folder, kind: Kind, entries: Mapping[str, Shard], compared: Collection[str]
) -> Callable[[str], Held]:
    """How to hold a file by its path. Knows no artifact, so that a thread that uses it keeps none alive."""
    return lambda path: hold(folder, entries[path], kind, compare=path in compared)


def _reopen(uri: str, manifest: Manifest, verify: Verify) -> Artifact:
    return Artifact(open_folder(uri), manifest, verify)


def _compared(manifest: Manifest, verify: Verify) -> frozenset[str]:
    """The files whose digests are to be compared."""
    entries = [*manifest.shards, *manifest.files]
    if verify != "full":
        count = 0 if verify == "off" else -(-len(entries) // _SAMPLED)
        own = manifest.digest
        entries.sort(key=lambda entry: hashlib.sha256(f"{own} {entry.path}".encode()).digest())
        entries = entries[:count]
    return frozenset(entry.path for entry in entries)


def no_artifact(folder: Folder, kind: Kind | None = None) -> EagleError:
    """The error for a folder that holds neither an artifact nor one that was begun.

    Args:
        kind: what was looked for.
    """
    make = f", or make it with eagle {STAGE_OF_KIND[kind]}" if kind else ""
    names = folder.names()
    if names == [""]:
        return EagleError(f"{folder.uri} is a file: give the artifact's folder")
    if not names:
        what = "is an empty folder" if _is_local_folder(folder) else "does not exist"
        return EagleError(f"{folder.uri} {what}: check the path{make}")
    sizes = folder.sizes([f"{name}/{MANIFEST_NAME}" for name in names[:_LOOKED_INTO]])
    if below := [name for name, size in zip(names, sizes, strict=False) if size is not None]:
        return EagleError(
            f"{folder.uri} is no artifact but holds some ({', '.join(below)}): give one of them{make}"
        )
    return EagleError(f"{folder.uri} is not an artifact, it has no {MANIFEST_NAME}: check the path{make}")


def _is_local_folder(folder: Folder) -> bool:
    return isinstance(folder, LocalFolder) and folder.root.is_dir()


def _no_manifest(folder: Folder, kind: Kind | None) -> EagleError:
    run = read_run(folder)
    if run is None:
        return no_artifact(folder, kind)
    stage = STAGE_OF_KIND[run.kind]
    if run.parts is not None:
        return EagleError(
            f"{folder.uri} is an unfinished {run.kind} artifact in {several(run.parts, 'part')}: when all "
            f"are finished, merge them with the same eagle {stage} command without --shard-index"
        )
    return EagleError(
        f"{folder.uri} is an unfinished {run.kind} artifact: run the eagle {stage} command "
        "that makes it again, and it continues"
    )


def _check_sizes(folder: Folder, manifest: Manifest) -> None:
    entries = [*manifest.shards, *manifest.files]
    sizes = folder.sizes([entry.path for entry in entries])
    for entry, size in zip(entries, sizes, strict=True):
        if size is None:
            raise missing_entry(folder.uri, manifest.kind, entry)
        check_entry(folder.uri, manifest.kind, entry, size)
