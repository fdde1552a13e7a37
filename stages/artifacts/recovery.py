"""What an interrupted run left in a folder: what of it counts, and how to remove what does not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stages.artifacts.folder import Folder, measure
from stages.artifacts.manifest import MANIFEST_NAME, Shard, check_path
from stages.artifacts.run_record import (
    RUN_NAME,
    FileRecords,
    ShardRecord,
    read_file_records,
    read_shard_records,
    remove_records,
    remove_shard_records,
)
from stages.artifacts.uri import join
from stages.errors import EagleError


def whole_shards(folder: Folder) -> list[ShardRecord]:
    """The committed shards up to the first that is not there with its size; later records are removed.

    The cut is at the first because a stage's notes build on all the shards before them.
    """
    records = read_shard_records(folder)
    sizes = folder.sizes([record.shard.path for record in records])
    whole: list[ShardRecord] = []
    for record, size in zip(records, sizes, strict=True):
        if size != record.shard.bytes:
            break
        whole.append(record)
    remove_shard_records(folder, first=len(whole))
    return whole


def whole_files(folder: Folder) -> list[Shard]:
    """The files beside the shards that are there; of one whose writing was cut off, whichever version is."""
    records = read_file_records(folder)
    files = {file.path: file for file in records.files}
    if (pending := records.pending) is not None:
        old = files.pop(pending.path, None)
        present = _version_present(folder, [pending] if old is None else [pending, old])
        if present is not None:
            files[present.path] = present
    sizes = folder.sizes(list(files))
    whole = [file for file, size in zip(files.values(), sizes, strict=True) if file.bytes == size]
    settled = FileRecords(files=tuple(whole))
    if settled != records:
        settled.write(folder)
    return whole


def recorded_paths(folder: Folder) -> list[str]:
    """Every file that the records of an unfinished artifact name."""
    records = read_file_records(folder)
    pending = [] if records.pending is None else [records.pending]
    shards = [record.shard for record in read_shard_records(folder)]
    return [entry.path for entry in (*shards, *records.files, *pending)]


def listed_paths(manifest: bytes, uri: str) -> tuple[Any, list[str]]:
    """Kind and files of a finished artifact, also where this eagle does not understand all of its manifest.

    Raises:
        EagleError: it is no manifest, or names files outside the artifact.
    """
    try:
        content = json.loads(manifest)
        entries = [*content["shards"], *content["files"]]
        return content["kind"], [check_path(entry["path"]) for entry in entries]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise EagleError(
            f"{join(uri, MANIFEST_NAME)} is not an artifact's manifest: choose another output, "
            "or remove the folder"
        ) from None


def discard_run(folder: Folder) -> None:
    """Removes what only writing needed, the run record last, so that a killed removal is taken up again."""
    remove_records(folder)
    folder.remove(RUN_NAME)


def _version_present(folder: Folder, versions: Sequence[Shard]) -> Shard | None:
    path = versions[0].path
    size = folder.size(path)
    if size not in [version.bytes for version in versions]:
        return None
    found = measure(folder.blocks(path))
    return next((version for version in versions if (version.bytes, version.sha256) == found), None)
