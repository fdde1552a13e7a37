"""Removing an artifact, finished or not, so that another can take its place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stages.artifacts.claims import last_claim, refuse_living
from stages.artifacts.folder import RUN_NAME, Folder
from stages.artifacts.manifest import MANIFEST_NAME, check_path
from stages.artifacts.parts import part_name
from stages.artifacts.records import read_records
from stages.artifacts.run_record import RUN_FOLDER, RunRecord, generation_of, read_run
from stages.artifacts.uri import join
from stages.errors import EagleError


def listed(manifest: bytes, uri: str) -> tuple[Any, list[str]]:
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


def everything(folder: Folder, manifest: bytes | None, run: RunRecord | None) -> list[str]:
    """What is to be removed of what is in a folder: files, and folders with a slash at the end.

    Raises:
        EagleError: another process is writing a part of it, or it is not understood.
    """
    paths = listed(manifest, folder.uri)[1] if manifest is not None else []
    if run is None:
        return paths
    paths += run.clearing or ()
    if run.generation and (last := last_claim(folder, run.generation)) is not None:
        paths += read_records(folder, run.generation, last[0]).paths
    for number in range(run.parts or 0):
        name = part_name(number, run.parts or 0)
        paths += [f"{name}/{path}" for path in _everything_of_part(folder.below(name))]
    return sorted(set(paths))


def clear(folder: Folder, paths: Sequence[str]) -> None:
    """Removes the manifest, and then these files and folders. It can be done again."""
    folder.remove(MANIFEST_NAME)
    folder.sweep()
    folder.remove_each([path for path in paths if not path.endswith("/")])
    for path in paths:
        if path.endswith("/"):
            folder.remove_tree(path.rstrip("/"))


def sweep_generations(folder: Folder) -> None:
    """Removes the claims and records of runs that are over: what a kill or a run that was replaced left."""
    found = folder.below(RUN_FOLDER).names() if RUN_FOLDER in folder.names() else []
    # Looked at after the listing: who has begun since then has a generation that is not among those found.
    run = folder.read(RUN_NAME)
    current = None if run is None else generation_of(run)
    for generation in found:
        if generation and generation != current:
            folder.remove_tree(f"{RUN_FOLDER}/{generation}")
    if run is None:
        folder.remove_empty(RUN_FOLDER)  # that a kill left


def _everything_of_part(folder: Folder) -> list[str]:
    manifest, run = folder.read(MANIFEST_NAME), read_run(folder)
    if run is not None and (last := last_claim(folder, run.generation)) is not None:
        refuse_living(folder, run.generation, *last)
    own = [] if manifest is None else [MANIFEST_NAME]
    return [*everything(folder, manifest, run), *own, RUN_NAME, f"{RUN_FOLDER}/"]
