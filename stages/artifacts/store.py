"""Writing an artifact so that any interruption can be continued, and reading one with its digests checked."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from stages import __version__
from stages.artifacts.cache import check_entry, local_copy, missing_entry
from stages.artifacts.comparison import refuse_difference
from stages.artifacts.folder import Folder, measure, open_folder
from stages.artifacts.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    STAGE_OF_KIND,
    Kind,
    Manifest,
    Parent,
    Shard,
    TargetFingerprint,
    canonical_json,
    check_path,
    parse_manifest,
)
from stages.artifacts.recovery import discard_run, listed_paths, recorded_paths, whole_files, whole_shards
from stages.artifacts.run_record import (
    RUN_NAME,
    FileRecords,
    Process,
    RunRecord,
    ShardRecord,
    read_run,
    remove_records,
    write_shard_record,
)
from stages.errors import EagleError


@dataclass(frozen=True)
class CommittedShard:
    """A shard that is whole and recorded, with the note its stage left for continuing after it."""

    shard: Shard
    note: dict[str, Any]


class ArtifactWriter:
    """Makes one artifact; `open` starts it, continues it, or finds it finished.

    A shard counts once its record is written, which happens after the shard itself; the manifest comes after
    everything. Leaving the context without `finish`, or being killed anywhere, leaves what is committed for
    the next `open` with the same kind, config, parents and target.

    Attributes:
        finished: the manifest if the artifact is complete (nothing can be added then), else None.
    """

    def __init__(
        self,
        folder: Folder,
        run: RunRecord,
        *,
        finished: Manifest | None = None,
        committed: Sequence[ShardRecord] = (),
        files: Sequence[Shard] = (),
    ) -> None:
        self.finished = finished
        self._folder = folder
        self._run = run
        self._committed = [CommittedShard(record.shard, record.note) for record in committed]
        self._files = {file.path: file for file in files}

    @classmethod
    def open(
        cls,
        uri: str,
        kind: Kind,
        config: dict[str, Any],
        *,
        parents: Sequence[Parent] = (),
        target: TargetFingerprint | None = None,
        overwrite: bool = False,
    ) -> ArtifactWriter:
        """Starts, continues or finds the artifact at `uri`.

        Args:
            config: the stage's settings that decide the result, as JSON values.
            parents: the artifacts it is made from; compared by digest, so they may have moved.
            overwrite: removes an artifact of the same kind, finished or not, and starts anew.

        Raises:
            EagleError: there is something else at `uri`, another process is writing it, or it was made with
                other settings, from other inputs or for another target.
        """
        folder = open_folder(uri)
        wanted = RunRecord(
            kind=kind,
            config=json.loads(canonical_json(config)),
            parents=tuple(parents),
            target=target,
            process=Process.of(os.getpid()),
        )
        manifest = folder.read(MANIFEST_NAME)
        run = read_run(folder)
        if run is not None and run.process is not None and run.process.is_other_and_alive():
            raise EagleError(
                f"another eagle process (pid {run.process.pid}) is writing {uri}: wait for it or stop it"
            )
        if manifest is None and run is None:
            _refuse_foreign(folder)
            folder.sweep()
            _claim(folder, wanted)
            return cls(folder, wanted)
        if overwrite:
            _replace(folder, wanted, manifest, run)
            return cls(folder, wanted)
        if manifest is not None:
            return cls(folder, wanted, finished=_accept(folder, wanted, manifest, run))
        assert run is not None
        return _continue(folder, wanted, run)

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Says that this process writes no more. What is committed stays for the next run."""
        if self.finished is None:
            # Without this the next run still sees a dead process, so a full disk is no reason to fail here.
            with suppress(EagleError):
                run = self._own_run()
                run.model_copy(update={"process": None}).write(self._folder)

    @property
    def uri(self) -> str:
        return self._folder.uri

    @property
    def committed(self) -> tuple[CommittedShard, ...]:
        """The shards so far, those of earlier runs first."""
        return tuple(self._committed)

    @property
    def files(self) -> tuple[Shard, ...]:
        """The files beside the shards so far, those of earlier runs too, sorted by path."""
        return tuple(self._files[path] for path in sorted(self._files))

    def add_shard(
        self, name: str, data: bytes | Path, rows: int, note: dict[str, Any] | None = None
    ) -> Shard:
        """Writes a shard and commits it.

        Args:
            name: its path in the artifact, new in it.
            data: its content, or a local file to copy.
            rows: how many rows it holds.
            note: JSON values that the stage finds in `committed` when it continues.

        Raises:
            EagleError: storage fails, or another process has taken over the artifact.
            ValueError: the name is taken or not usable.
        """
        self._may_write(name)
        if name in self._files or self._is_shard(name):
            raise ValueError(f"{name} is already in the artifact")
        shard = _entry(name, data, rows)
        record = ShardRecord(shard=shard, note=json.loads(canonical_json(note or {})))
        self._folder.write(name, data)
        write_shard_record(self._folder, len(self._committed), record)
        self._committed.append(CommittedShard(record.shard, record.note))
        return shard

    def add_file(self, name: str, data: bytes | Path) -> None:
        """Writes a file beside the shards, or replaces one; the same content again is not written again.

        A run killed in the middle leaves the old file or the new one, never a mixture and never neither.

        Raises:
            EagleError: storage fails, or another process has taken over the artifact.
            ValueError: the name is a shard's or not usable.
        """
        self._may_write(name)
        if self._is_shard(name):
            raise ValueError(f"{name} is a shard of the artifact")
        file = _entry(name, data, rows=0)
        if self._files.get(name) == file:
            return
        # The record comes first and has both versions, so that whichever a kill leaves is known.
        FileRecords(files=self.files, pending=file).write(self._folder)
        self._folder.write(name, data)
        self._files[name] = file

    def local(self, name: str) -> Path:
        """A local file with the content of a committed shard or file, as `Artifact.local`.

        Raises:
            EagleError: it is not what was written, or cannot be fetched.
            KeyError: nothing of that name is committed.
        """
        entries = {done.shard.path: done.shard for done in self._committed} | self._files
        entry = entries[name]
        return local_copy(self._folder, entry, self._run.kind, key=entry.sha256)

    def finish(self, counts: dict[str, Any], *, drop: Collection[str] = ()) -> Manifest:
        """Writes the manifest, which makes the folder an artifact, and removes what only writing needed.

        Args:
            drop: files added with `add_file` that are no part of the result, such as a checkpoint; they go
                once the manifest is there, so that a kill before that costs nothing.

        Raises:
            EagleError: storage fails, or another process has taken over the artifact.
        """
        self._may_write()
        manifest = Manifest(
            kind=self._run.kind,
            schema_version=SCHEMA_VERSION,
            tool_version=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=self._run.config,
            parents=self._run.parents,
            target=self._run.target,
            counts=counts,
            shards=tuple(done.shard for done in self._committed),
            files=tuple(file for file in self.files if file.path not in drop),
        )
        self._folder.write(MANIFEST_NAME, manifest.to_json())
        for name in self._files.keys() & set(drop):
            self._folder.remove(name)
        discard_run(self._folder)
        self.finished = manifest
        return manifest

    def _is_shard(self, name: str) -> bool:
        return any(name == done.shard.path for done in self._committed)

    def _may_write(self, name: str | None = None) -> None:
        if self.finished is not None:
            raise RuntimeError(f"{self.uri} is finished; nothing can be added to it")
        if name is not None:
            check_path(name)
        self._own_run()

    def _own_run(self) -> RunRecord:
        """The run record, if it is still this writer's.

        Raises:
            EagleError: another writer has taken over, or removed or finished the artifact.
        """
        run = read_run(self._folder)
        if run is None:
            raise EagleError(f"{self.uri} was removed while it was written: run the same command again")
        if run.process != self._run.process:
            by = f" (pid {run.process.pid} on {run.process.host})" if run.process else ""
            raise EagleError(
                f"{self.uri} was taken over by another eagle process{by}: let it finish, "
                "or stop it and run the same command again"
            )
        return run


class Artifact:
    """A finished artifact. Get one from `open_artifact`.

    Attributes:
        uri: where it is, as the user typed it.
        manifest: what it is.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.uri = folder.uri
        self.manifest = manifest
        self._folder = folder
        self._entries = {entry.path: entry for entry in (*manifest.shards, *manifest.files)}

    def parent(self) -> Parent:
        """This artifact as an input of another."""
        return Parent(uri=self.uri, kind=self.manifest.kind, digest=self.manifest.digest)

    def read(self, path: str) -> bytes:
        """The content of a file, compared with its digest.

        Raises:
            EagleError: there is no such file, or it is truncated or changed.
        """
        if path not in self._entries:
            raise self._no_such(path)
        entry = self._entries[path]
        data = self._folder.read(path)
        if data is None:
            raise missing_entry(self.uri, self.manifest.kind, entry)
        check_entry(self.uri, self.manifest.kind, entry, *measure(data))
        return data

    def local(self, path: str) -> Path:
        """A local path with the content of a file, or with the files below a folder of the artifact.

        The file itself where the artifact is local; else a copy in the cache folder, fetched once, with the
        same relative path. Digests are compared once per file and process.

        Args:
            path: a file or folder of the artifact; "." is the artifact itself.

        Raises:
            EagleError: there is nothing of that name, or a file is truncated or changed or cannot be fetched.
        """
        kind, key = self.manifest.kind, self.manifest.digest
        if path in self._entries:
            return local_copy(self._folder, self._entries[path], kind, key)
        prefix = "" if path == "." else path.rstrip("/") + "/"
        below = [entry for name, entry in self._entries.items() if name.startswith(prefix)]
        if not below:
            raise self._no_such(path)
        copies = [local_copy(self._folder, entry, kind, key) for entry in below]
        return copies[0].parents[below[0].path.removeprefix(prefix).count("/")]

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

    def _no_such(self, path: str) -> EagleError:
        again = f"make the artifact again with eagle {STAGE_OF_KIND[self.manifest.kind]} --overwrite"
        return EagleError(f"{self.uri} has no file {path}: {again}")


def open_artifact(uri: str, kind: Kind, *, verify: bool = True) -> Artifact:
    """Opens a finished artifact for reading.

    Args:
        verify: also sees that every file is there with its size. Digests are compared as files are read.

    Raises:
        EagleError: there is no finished artifact, it is of another kind or a newer schema, or files are
            missing or truncated.
    """
    folder = open_folder(uri)
    data = folder.read(MANIFEST_NAME)
    if data is None:
        raise _no_manifest(folder, kind)
    manifest = parse_manifest(data, uri)
    if manifest.kind != kind:
        raise EagleError(
            f"{uri} is a {manifest.kind} artifact where {kind} is needed: "
            f"give one that eagle {STAGE_OF_KIND[kind]} made"
        )
    if verify:
        _check_sizes(folder, manifest)
    return Artifact(folder, manifest)


def artifact_state(uri: str) -> Literal["missing", "partial", "complete"]:
    """Whether there is a finished artifact, an unfinished one, or none.

    Raises:
        EagleError: the URI cannot be opened.
    """
    folder = open_folder(uri)
    if folder.size(MANIFEST_NAME) is not None:
        return "complete"
    return "missing" if folder.size(RUN_NAME) is None else "partial"


def _entry(name: str, data: bytes | Path, rows: int) -> Shard:
    size, sha256 = measure(data)
    return Shard(path=name, rows=rows, bytes=size, sha256=sha256)


def _refuse_foreign(folder: Folder) -> None:
    name = folder.first_name()
    if name == "":
        raise EagleError(f"{folder.uri} is a file: give a folder that is empty or does not exist yet")
    if name is not None:
        raise EagleError(
            f"{folder.uri} holds something that is no artifact ({name}): give a folder that is empty "
            "or does not exist yet"
        )


def _claim(folder: Folder, run: RunRecord) -> None:
    """Writes the run record and reads it back, so that of two that start at once only one goes on, mostly."""
    run.write(folder)
    if read_run(folder) != run:
        raise EagleError(
            f"another eagle process has just begun to write {folder.uri}: wait for it or stop it first"
        )


def _accept(folder: Folder, wanted: RunRecord, manifest: bytes, run: RunRecord | None) -> Manifest:
    """The finished artifact that is there, if it is the wanted one."""
    finished = parse_manifest(manifest, folder.uri)
    refuse_difference(folder.uri, "a finished", finished, wanted)
    if run is not None:
        listed = {entry.path for entry in (*finished.shards, *finished.files)}
        for path in recorded_paths(folder):
            if path not in listed:
                folder.remove(path)
        folder.sweep()
        discard_run(folder)
    return finished


def _continue(folder: Folder, wanted: RunRecord, run: RunRecord) -> ArtifactWriter:
    """A writer that goes on after what an interrupted run of the wanted artifact committed."""
    if run.schema_version != SCHEMA_VERSION:
        raise EagleError(f"{folder.uri} was begun by another version of eagle: use --overwrite to start anew")
    refuse_difference(folder.uri, "an unfinished", run, wanted)
    _claim(folder, wanted.model_copy(update={"clearing": run.clearing}))
    folder.sweep()
    if run.clearing is not None:
        _clear(folder, wanted, run.clearing)
        return ArtifactWriter(folder, wanted)
    return ArtifactWriter(folder, wanted, committed=whole_shards(folder), files=whole_files(folder))


def _replace(folder: Folder, wanted: RunRecord, manifest: bytes | None, run: RunRecord | None) -> None:
    """Removes what is there, finished or not, in an order that another run can take up after a kill."""
    if manifest is not None:
        kind, paths = listed_paths(manifest, folder.uri)
    else:
        assert run is not None
        kind, paths = run.kind, [*(run.clearing or ()), *recorded_paths(folder)]
    if kind != wanted.kind:
        raise EagleError(
            f"{folder.uri} holds a {kind} artifact, which --overwrite does not replace with "
            f"{wanted.kind}: choose another output, or remove it first"
        )
    _claim(folder, wanted.model_copy(update={"clearing": tuple(paths)}))
    folder.remove(MANIFEST_NAME)
    folder.sweep()
    _clear(folder, wanted, paths)


def _clear(folder: Folder, wanted: RunRecord, paths: Sequence[str]) -> None:
    for path in paths:
        folder.remove(path)
    remove_records(folder)
    wanted.write(folder)


def _no_manifest(folder: Folder, kind: Kind) -> EagleError:
    run = read_run(folder)
    if run is None:
        return EagleError(
            f"{folder.uri} is not an artifact, it has no {MANIFEST_NAME}: check the path, "
            f"or make it with eagle {STAGE_OF_KIND[kind]}"
        )
    return EagleError(
        f"{folder.uri} is an unfinished {run.kind} artifact: run the eagle {STAGE_OF_KIND[run.kind]} command "
        "that makes it again, and it continues"
    )


def _check_sizes(folder: Folder, manifest: Manifest) -> None:
    entries = [*manifest.shards, *manifest.files]
    sizes = folder.sizes([entry.path for entry in entries])
    for entry, size in zip(entries, sizes, strict=True):
        if size is None:
            raise missing_entry(folder.uri, manifest.kind, entry)
        check_entry(folder.uri, manifest.kind, entry, size)
