"""Making one artifact of the finished parts of a job array."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stages.artifacts.artifact import Artifact, open_artifact
from stages.artifacts.comparison import refuse_difference
from stages.artifacts.folder import RUN_NAME, Folder, at_once, open_folder
from stages.artifacts.manifest import (
    MANIFEST_NAME,
    STAGE_OF_KIND,
    Kind,
    Manifest,
    Parent,
    Shard,
    TargetFingerprint,
)
from stages.artifacts.opening import begin, refuse_other_run
from stages.artifacts.parts import part_folders, part_name
from stages.artifacts.run_record import RunRecord, read_run
from stages.artifacts.writer import ArtifactWriter, new_run
from stages.errors import EagleError


def merge_parts(
    uri: str,
    kind: Kind,
    config: dict[str, Any],
    parents: Sequence[Parent],
    target: TargetFingerprint | None,
    number: int,
    counts: Callable[[list[dict[str, Any]]], dict[str, Any]],
    files_from: int = 0,
) -> Manifest:
    """Makes the finished parts 0 to `number` - 1 at `uri` one artifact; the shards stay where they are.

    Killed and called again it goes on; called once more it finds the artifact finished.

    Args:
        counts: the counts of the whole from those of the parts, in order.
        files_from: the part whose files beside the shards become the whole's; those of the others go.

    Raises:
        EagleError: parts are missing or unfinished, or were made with other settings or in another number.
    """
    folder = open_folder(uri)
    wanted = new_run(kind, config, parents, target).model_copy(update={"parts": number})
    if folder.size(MANIFEST_NAME) is None:
        _refuse_unfinished(folder, wanted, number)
    with ArtifactWriter(folder, begin(folder, wanted, overwrite=False)) as writer:
        if writer.finished is not None:
            return writer.finished
        parts = at_once(lambda part: _finished_part(part, wanted), part_folders(folder, number))
        for file in parts[files_from].manifest.files:
            with parts[files_from].pinned(file.path) as path:
                writer.add_file(file.path, path)
        shards = [
            _of_whole(shard, part_name(i, number))
            for i, part in enumerate(parts)
            for shard in part.manifest.shards
        ]
        return writer.finish_with(shards, counts([part.manifest.counts for part in parts]))


def _refuse_unfinished(folder: Folder, wanted: RunRecord, number: int) -> None:
    """Refuses what cannot be merged, before anything is claimed."""
    run = read_run(folder)
    if run is None:
        raise EagleError(
            f"{folder.uri} has no parts to merge: make them with eagle {STAGE_OF_KIND[wanted.kind]} "
            f"--num-shards {number} and --shard-index 0 to {number - 1}"
        )
    refuse_other_run(folder, run, wanted, finished=False)
    sizes = at_once(lambda part: part.size(MANIFEST_NAME), part_folders(folder, number))
    missing = [str(i) for i, size in enumerate(sizes) if size is None]
    if missing:
        one = not missing[1:]
        raise EagleError(
            f"{'part' if one else 'parts'} {', '.join(missing)} of {number} of {folder.uri} "
            f"{'is' if one else 'are'} not finished: run the same command with --shard-index {missing[0]}"
            + (" first" if one else " and so on first")
        )


def _finished_part(folder: Folder, wanted: RunRecord) -> Artifact:
    own = wanted.model_copy(update={"parts": None})
    if folder.size(RUN_NAME) is not None:
        begin(folder, own, overwrite=False)  # was killed when all but tidying up was done
    part = open_artifact(folder.uri, wanted.kind)
    refuse_difference(folder.uri, "a finished", part.manifest, own)
    return part


def _of_whole(shard: Shard, part: str) -> Shard:
    return shard.model_copy(update={"path": f"{part}/{shard.path}"})
