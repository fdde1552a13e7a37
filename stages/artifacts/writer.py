"""Writing an artifact so that any interruption can be continued."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Literal, overload

from stages import __version__
from stages.artifacts.cache import hold
from stages.artifacts.claims import Finishing
from stages.artifacts.folder import Folder, measure, open_folder
from stages.artifacts.manifest import (
    SCHEMA_VERSIONS,
    Kind,
    Manifest,
    Parent,
    Shard,
    TargetFingerprint,
    canonical_json,
    check_path,
)
from stages.artifacts.opening import Begun, Finished, begin, complete, open_part, refuse_early
from stages.artifacts.parts import part_name
from stages.artifacts.records import ShardRecord, State, whole_files
from stages.artifacts.retry import passes
from stages.artifacts.run_record import RunRecord, new_generation
from stages.artifacts.uri import join
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

    def __init__(self, folder: Folder, opened: Begun | Finished) -> None:
        self.finished = opened.manifest if isinstance(opened, Finished) else None
        self._folder = folder
        self._begun = opened if isinstance(opened, Begun) else None
        committed = self._begun.committed if self._begun else ()
        self._committed = [CommittedShard(record.shard, record.note) for record in committed]
        self._files = dict(self._begun.files) if self._begun else {}
        self._pending: threading.Thread | None = None
        self._failed: BaseException | None = None

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
        part: tuple[int, int] | None = None,
    ) -> ArtifactWriter:
        """Starts, continues or finds the artifact at `uri`.

        Args:
            config: the stage's settings that decide the result, as JSON values.
            parents: the artifacts it is made from; compared by digest, so they may have moved.
            overwrite: removes an artifact of the same kind, finished or not, and starts anew.
            part: (i, n): makes part i of n, counted from 0, for `merge_parts`. If the whole artifact is there
                already, that is what is found.

        Raises:
            EagleError: there is something else at `uri`, another process is writing it, or it was made with
                other settings, from other inputs or for another target.
        """
        folder = _output_folder(uri)
        wanted = new_run(kind, config, parents, target)
        if part is not None:
            number, of = part
            if not 0 <= number < of:
                raise ValueError(f"part {number} of {of}")
            whole = open_part(folder, wanted.model_copy(update={"parts": of}), overwrite=overwrite)
            if whole is not None:
                return cls(folder, Finished(whole))
            folder = folder.below(part_name(number, of))
        return cls(folder, begin(folder, wanted, overwrite=overwrite))

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commits what is pending, and says that this process writes no more, so that the next run can."""
        if self.finished is not None or self._begun is None:
            return
        try:
            self.flush()
        except BaseException as failed:
            if error is None:
                error = failed
                raise
        finally:
            # A process that could not say this is seen to be dead all the same.
            with suppress(EagleError):
                if error is not None and passes(error.__cause__):
                    self._begun.owner.stop()  # the store does not answer, so it is not waited for once more
                else:
                    self._begun.owner.end()

    @property
    def uri(self) -> str:
        return self._folder.uri

    @property
    def committed(self) -> tuple[CommittedShard, ...]:
        """The shards that are recorded, those of earlier runs first; not one that a thread still writes."""
        return tuple(self._committed)

    @property
    def files(self) -> tuple[Shard, ...]:
        """The files beside the shards so far, those of earlier runs too, sorted by path."""
        return tuple(self._files[path] for path in sorted(self._files))

    @overload
    def add_shard(
        self,
        name: str,
        data: bytes | Path,
        rows: int,
        note: dict[str, Any] | None = None,
        *,
        wait: Literal[True] = True,
    ) -> Shard: ...

    @overload
    def add_shard(
        self, name: str, data: bytes | Path, rows: int, note: dict[str, Any] | None = None, *, wait: bool
    ) -> Shard | None: ...

    def add_shard(
        self,
        name: str,
        data: bytes | Path,
        rows: int,
        note: dict[str, Any] | None = None,
        *,
        wait: bool = True,
    ) -> Shard | None:
        """Writes a shard and commits it, under its name with the first digits of its sha256 added.

        So two processes that both believe to write a shard never replace each other's, and a rerun that makes
        the same content makes the same file.

        Args:
            name: its path in the artifact, new in it: `a-0.bin` is stored as `a-0-1f2e3d4c.bin`.
            data: its content, or a local file to copy.
            rows: how many rows it holds.
            note: JSON values that the stage finds in `committed` when it continues.
            wait: False leaves it to a thread, once that has committed the one before. What fails there is
                raised by each later call, and on leaving the context. A file given has to stay until then.

        Returns:
            the shard as it is recorded; None when it was left to the thread.

        Raises:
            EagleError: storage fails, or another process has taken over the artifact.
            ValueError: the name is taken or not usable.
        """
        self.flush()
        self._may_add(name)
        if name in self._files or self._is_shard(name):
            raise ValueError(f"{name} is already in the artifact")
        note = json.loads(canonical_json(note or {}))
        if wait:
            return self._commit(name, data, rows, note)
        self._pending = threading.Thread(
            target=self._commit_later, args=(name, data, rows, note), name="eagle-shard"
        )
        self._pending.start()
        return None

    def flush(self) -> None:
        """Waits until everything added is committed.

        Raises:
            EagleError: it could not be.
        """
        if self._pending is not None:
            self._pending.join()
            self._pending = None
        if self._failed is not None:
            raise self._failed

    def add_file(self, name: str, data: bytes | Path) -> None:
        """Writes a file beside the shards, or replaces one; the same content again is not written again.

        A run killed in the middle leaves the old file or the new one, never a mixture and never neither.

        Raises:
            EagleError: storage fails, or another process has taken over the artifact.
            ValueError: the name is a shard's or not usable.
        """
        self.flush()
        begun = self._may_add(name)
        begun.owner.check()
        if self._is_shard(name):
            raise ValueError(f"{name} is a shard of the artifact")
        file = _entry(name, data, rows=0)
        if self._files.get(name) == file:
            return
        # The record comes first and has both versions, so that whichever a kill leaves is known.
        begun.records.set_files(self.files, pending=file)
        begun.owner.check()  # once more, because this name is one that others write too
        self._folder.write(name, data)
        self._files[name] = file

    def local(self, name: str) -> Path:
        """A local file with the content of a committed shard or file, as `Artifact.local`.

        Args:
            name: its path as it is recorded.

        Raises:
            EagleError: it is not what was written, or cannot be fetched.
            KeyError: nothing of that name is committed.
        """
        entry = ({done.shard.path: done.shard for done in self._committed} | self._files)[name]
        kind = self.finished.kind if self._begun is None else self._begun.run.kind  # type: ignore[union-attr]
        return hold(self._folder, entry, kind).keep_a_while()

    def finish(self, counts: dict[str, Any], *, drop: Collection[str] = ()) -> Manifest:
        """Writes the manifest, which makes the folder an artifact, and removes what only writing needed.

        Args:
            drop: files added with `add_file` that are no part of the result, such as a checkpoint; they go
                once the manifest is there, so that a kill before that costs nothing.

        Raises:
            EagleError: storage fails, or another process has taken over the artifact.
        """
        self.flush()
        return self.finish_with([done.shard for done in self._committed], counts, drop=drop)

    def finish_with(
        self, shards: Sequence[Shard], counts: dict[str, Any], *, drop: Collection[str] = ()
    ) -> Manifest:
        """`finish`, with shards that others have committed in folders of this artifact."""
        begun = self._may_add()
        if begun.owner.claim.unsure:
            self._refuse_changed_files(begun)
        manifest = Manifest(
            kind=begun.run.kind,
            schema_version=begun.run.schema_version,
            tool_version=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            config=begun.run.config,
            parents=begun.run.parents,
            target=begun.run.target,
            counts=counts,
            shards=tuple(shards),
            files=tuple(file for file in self.files if file.path not in drop),
        )
        manifest.to_json()  # raises for numbers that JSON lacks, before anything is claimed
        dropped = tuple(sorted(self._files.keys() & set(drop)))
        owner = begun.owner.advance(Finishing(manifest=manifest, drop=dropped))
        self.finished = complete(self._folder, begun.run, owner)
        return self.finished

    def _commit_later(self, name: str, data: bytes | Path, rows: int, note: dict[str, Any]) -> None:
        try:
            self._commit(name, data, rows, note)
        except BaseException as error:
            self._failed = error

    def _commit(self, name: str, data: bytes | Path, rows: int, note: dict[str, Any]) -> Shard:
        begun = self._may_add()
        entry = _entry(name, data, rows)
        shard = entry.model_copy(update={"path": content_name(name, entry.sha256)})
        record, number = ShardRecord(shard=shard, note=note), len(self._committed)
        begun.owner.check()
        begun.records.begin_shard(number, record)
        self._folder.write(shard.path, data)
        begun.records.commit_shard(number, record)
        self._committed.append(CommittedShard(shard, note))
        return shard

    def _is_shard(self, name: str) -> bool:
        return any(
            done.shard.path in (name, content_name(name, done.shard.sha256)) for done in self._committed
        )

    def _may_add(self, name: str | None = None) -> Begun:
        if self.finished is not None or self._begun is None:
            raise RuntimeError(f"{self.uri} is finished; nothing can be added to it")
        if name is not None:
            check_path(name)
        return self._begun

    def _refuse_changed_files(self, begun: Begun) -> None:
        """Refuses to finish with a file that a writer that was taken for dead has replaced since."""
        whole = whole_files(self._folder, State(files=self.files), compare=True)
        if changed := [file.path for file in self.files if file not in whole]:
            raise EagleError(
                f"{join(self.uri, changed[0])} was changed by another process: see that no other eagle "
                "writes this artifact, and run the same command again"
            )


def new_run(
    kind: Kind, config: dict[str, Any], parents: Sequence[Parent], target: TargetFingerprint | None
) -> RunRecord:
    """The record of a run that is about to begin, its settings as JSON gives them back."""
    return RunRecord(
        kind=kind,
        schema_version=SCHEMA_VERSIONS[kind],
        generation=new_generation(),
        config=json.loads(canonical_json(config)),
        parents=tuple(parents),
        target=target,
    )


def refuse_output(
    uri: str,
    kind: Kind,
    config: dict[str, Any],
    *,
    target: TargetFingerprint | None,
    overwrite: bool,
    part: tuple[int, int] | None,
    unknown: str,
) -> None:
    """Refuses, before much is read, what `ArtifactWriter.open` with these arguments would refuse.

    Args:
        unknown: the setting that is not known yet; whatever it will be, it is no reason to refuse.

    Raises:
        EagleError: see `ArtifactWriter.open`; or nothing can be written there.
    """
    folder = _output_folder(uri)
    wanted = new_run(kind, config, (), target).model_copy(update={"parts": part[1] if part else None})
    refuse_early(folder, wanted, overwrite=overwrite, unknown=unknown)


def _output_folder(uri: str) -> Folder:
    if uri.startswith(("http://", "https://")):
        raise EagleError(f"{uri} can only be read: give a local path or the URI of a bucket to write to")
    return open_folder(uri)


def content_name(name: str, sha256: str) -> str:
    """`a/b.bin` as `a/b-1f2e3d4c.bin`: a name that no other content has."""
    path = PurePosixPath(name)
    return str(path.with_name(f"{path.stem}-{sha256[:8]}{path.suffix}"))


def _entry(name: str, data: bytes | Path, rows: int) -> Shard:
    size, sha256 = measure(data)
    return Shard(path=name, rows=rows, bytes=size, sha256=sha256)
