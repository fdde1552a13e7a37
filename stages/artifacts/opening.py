"""Beginning to write: an artifact is started, continued, replaced, or found finished.

What is to be done is decided by what is there: a manifest (finished), a run record (begun), both (being
finished, or being replaced), or neither. It is decided before the artifact is claimed, so that a refusal
changes nothing, and looked at again afterwards, because another process may have changed it in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeGuard

from stages.artifacts.claims import Ownership, StillWrittenError, last_claim, refuse_living
from stages.artifacts.clearing import clear, everything, listed, sweep_generations
from stages.artifacts.comparison import refuse_difference
from stages.artifacts.folder import RUN_NAME, Folder
from stages.artifacts.manifest import MANIFEST_NAME, Manifest, Shard, parse_manifest
from stages.artifacts.parts import dissolve_parts
from stages.artifacts.records import Records, ShardRecord, State, continue_records
from stages.artifacts.run_record import RUN_FOLDER, RunRecord, read_run
from stages.artifacts.uri import refuse_read_only
from stages.config import several
from stages.errors import EagleError

_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Finished:
    """The artifact is complete, and nobody's to write."""

    manifest: Manifest


@dataclass(frozen=True)
class Begun:
    """The artifact is this process's to write, after what is committed."""

    run: RunRecord
    owner: Ownership
    records: Records
    committed: Sequence[ShardRecord] = ()
    files: dict[str, Shard] = field(default_factory=dict)


@dataclass(frozen=True)
class _Found:
    """What is in the folder of an artifact."""

    manifest: bytes | None
    run: RunRecord | None

    @classmethod
    def look(cls, folder: Folder) -> _Found:
        run = read_run(folder)  # first, since it goes only after the manifest has come
        return cls(folder.read(MANIFEST_NAME), run)


def refuse_early(folder: Folder, wanted: RunRecord, *, overwrite: bool, unknown: str) -> None:
    """Refuses what `begin` and `open_part` would refuse, and changes nothing.

    Args:
        unknown: the setting of `wanted` that is not known yet; it counts as equal.

    Raises:
        EagleError: there is something else, or it was made with other settings.
    """
    found = _Found.look(folder)
    old: RunRecord | Manifest | None = found.run
    if old is None and found.manifest is not None and not overwrite:
        old = _finished(folder, found)
    if old is not None:
        wanted = wanted.model_copy(update={"config": wanted.config | {unknown: old.config.get(unknown)}})
    if _run_to_join(folder, found, wanted, overwrite) is not None:
        refuse_read_only(folder.uri)


def begin(folder: Folder, wanted: RunRecord, *, overwrite: bool) -> Begun | Finished:
    """Claims the artifact in `folder` for a run, or finds it finished.

    Args:
        wanted: what the artifact is to be made from, with a generation that is new.

    Raises:
        EagleError: there is something else, or it was made with other settings.
        StillWrittenError: another process is writing it.
    """
    while True:
        found = _Found.look(folder)
        run = _run_to_join(folder, found, wanted, overwrite)
        if run is None:
            sweep_generations(folder)
            return Finished(_finished(folder, found))
        if found.run is None and not folder.create(RUN_NAME, run.to_json()):
            continue
        if found.run is not None and run.generation != found.run.generation:
            folder.write(RUN_NAME, run.to_json())
        owner = Ownership.take(folder, run.generation)
        if _Found.look(folder) == _Found(found.manifest, run):
            try:
                return _go_on(folder, found, wanted, run, owner, overwrite)
            except BaseException:
                with suppress(EagleError):
                    owner.end()
                raise
        owner.end()


def _run_to_join(folder: Folder, found: _Found, wanted: RunRecord, overwrite: bool) -> RunRecord | None:
    """The run to claim: the one that is there, or a new one; None where the finished artifact will do.

    Raises:
        EagleError: neither.
    """
    if found.manifest is None and found.run is None:
        _refuse_foreign(folder)
        return wanted
    if overwrite:
        _refuse_other_kind(folder, found, wanted)
        if found.run is None or found.run.of_other_version:
            return _clearing(folder, found, wanted)
        return found.run
    if found.run is None:
        _accept(folder, found, wanted)
        return None
    refuse_other_run(folder, found.run, wanted, finished=found.manifest is not None)
    return found.run


def _go_on(
    folder: Folder, found: _Found, wanted: RunRecord, run: RunRecord, owner: Ownership, overwrite: bool
) -> Begun | Finished:
    """Does, as the owner, what was decided."""
    if overwrite and found.run is not None and not found.run.of_other_version:
        run = _clearing(folder, found, wanted.model_copy(update={"generation": run.generation}))
        folder.write(RUN_NAME, run.to_json())
        owner.forget_finishing()
    if run.clearing is not None:
        clear(folder, run.clearing)
        sweep_generations(folder)
        records = Records(folder, run.generation, owner.number, State())
        records.set_files([], None)
        run = run.model_copy(update={"clearing": None})
        folder.write(RUN_NAME, run.to_json())
        return Begun(run, owner, records)
    folder.sweep()
    if owner.claim.finishing is not None:
        return Finished(complete(folder, run, owner))
    committed, files, records = continue_records(
        folder, run.generation, owner.number, unsure=owner.claim.unsure
    )
    return Begun(run, owner, records, committed, files)


def complete(folder: Folder, run: RunRecord, owner: Ownership) -> Manifest:
    """Does what is left of finishing; the same whoever does it, and however often.

    The run record goes last of what decides anything: what only writing needed is garbage from then on.
    """
    finishing = owner.claim.finishing
    assert finishing is not None
    folder.write(MANIFEST_NAME, finishing.manifest.to_json())
    folder.remove_each(finishing.drop)
    if run.parts is not None:
        dissolve_parts(folder, run.parts)
    owner.stop()
    folder.remove(RUN_NAME)
    folder.remove_tree(f"{RUN_FOLDER}/{run.generation}")
    return finishing.manifest


def open_part(folder: Folder, wanted: RunRecord, *, overwrite: bool) -> Manifest | None:
    """Prepares the folder of the whole artifact for a part, and waits while another part does so.

    Args:
        wanted: with the number of parts.

    Returns:
        the manifest of the whole artifact where it is finished, None where the part is to be made.

    Raises:
        EagleError: there is something else, or parts of another run or number.
    """
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            found = _Found.look(folder)
            if found.manifest is None and found.run is None:
                _refuse_foreign(folder)
                folder.create(RUN_NAME, wanted.to_json())
            elif found.manifest is not None and not overwrite:
                return _accept(folder, found, wanted)
            elif found.manifest is None and _is_ready(found.run, wanted):
                _refuse_merging(folder, found.run)
                return None
            else:
                begun = begin(folder, wanted, overwrite=overwrite)
                if isinstance(begun, Begun):
                    begun.owner.end()
        except StillWrittenError as error:
            if error.uri != folder.uri or time.monotonic() > until:
                raise
            time.sleep(1)


def refuse_other_run(folder: Folder, run: RunRecord, wanted: RunRecord, *, finished: bool) -> None:
    """Refuses to go on with a run that is there, for `wanted`, unless it is the same.

    Raises:
        EagleError: it is of another version, divided otherwise, or made with other settings.
    """
    uri = folder.uri
    if run.of_other_version or run.schema_version != wanted.schema_version:
        if run.kind != wanted.kind:
            refuse_difference(uri, "an unfinished", run, wanted)
        raise EagleError(f"{uri} was begun by another version of eagle: use --overwrite to start anew")
    state = "a finished" if finished and run.clearing is None else "an unfinished"
    refuse_difference(uri, state, run, wanted)
    if run.parts == wanted.parts:
        return
    if run.parts is None:
        raise EagleError(
            f"{uri} was begun as a whole, not in {several(wanted.parts or 0, 'part')}: go on without "
            "--num-shards, or use --overwrite to start anew"
        )
    if wanted.parts is None:
        raise EagleError(
            f"{uri} is being made in {several(run.parts, 'part')}: merge them with --num-shards "
            f"{run.parts} when all are finished, or use --overwrite to start anew"
        )
    raise EagleError(
        f"{uri} is being made in {several(run.parts, 'part')}, not {wanted.parts}: use --num-shards "
        f"{run.parts}, or --overwrite to start anew"
    )


def _is_ready(run: RunRecord | None, wanted: RunRecord) -> TypeGuard[RunRecord]:
    """Whether parts of `wanted` can be made in a folder with this run record."""
    settled = {"generation": wanted.generation, "clearing": None}
    return run is not None and run.clearing is None and run.model_copy(update=settled) == wanted


def _refuse_merging(folder: Folder, run: RunRecord) -> None:
    if (last := last_claim(folder, run.generation)) is not None:
        refuse_living(folder, run.generation, *last)


def _accept(folder: Folder, found: _Found, wanted: RunRecord) -> Manifest:
    if found.run is not None:
        refuse_other_run(folder, found.run, wanted, finished=True)
    manifest = _finished(folder, found)
    refuse_difference(folder.uri, "a finished", manifest, wanted)
    return manifest


def _finished(folder: Folder, found: _Found) -> Manifest:
    assert found.manifest is not None
    return parse_manifest(found.manifest, folder.uri)


def _clearing(folder: Folder, found: _Found, wanted: RunRecord) -> RunRecord:
    """`wanted`, with what has to be removed before it can begin."""
    paths = everything(folder, found.manifest, found.run)
    return wanted.model_copy(update={"clearing": tuple(paths)})


def _refuse_other_kind(folder: Folder, found: _Found, wanted: RunRecord) -> None:
    kind = found.run.kind if found.run is not None else None
    if found.manifest is not None:
        kind, _ = listed(found.manifest, folder.uri)
    if kind != wanted.kind:
        raise EagleError(
            f"{folder.uri} holds a {kind} artifact, which --overwrite does not replace with "
            f"{wanted.kind}: choose another output, or remove it first"
        )


def _refuse_foreign(folder: Folder) -> None:
    """Refuses a folder that has neither manifest nor run record but something else."""
    names = [name for name in folder.names() if name != RUN_FOLDER]
    if names == [""]:
        raise EagleError(f"{folder.uri} is a file: give a folder that is empty or does not exist yet")
    if names and RUN_NAME not in names:  # else another process has begun just now
        raise EagleError(
            f"{folder.uri} holds something that is no artifact ({names[0]}): give a folder that is empty "
            "or does not exist yet"
        )
