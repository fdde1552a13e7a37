"""What lies at a URI: a finished artifact, an unfinished one, parts of one, or none. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from stages.artifacts import Artifact, Manifest, Shard, Unfinished, join, part_name, unfinished
from stages.artifacts.artifact import no_artifact
from stages.artifacts.folder import Folder, at_once, open_folder
from stages.artifacts.manifest import MANIFEST_NAME, parse_manifest
from stages.artifacts.process import Process
from stages.artifacts.run_record import RunRecord

State = Literal["complete", "unfinished", "parts"]


@dataclass(frozen=True)
class Part:
    """One part of a job array, from 0."""

    index: int
    state: Literal["complete", "unfinished", "missing"]
    shards: int = 0
    rows: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Place:
    """An artifact, whatever its state.

    Attributes:
        manifest: of an unfinished artifact, or of one in parts, what its manifest would say by now; `created`
            and `tool_version` are then "".
        writer: who makes an unfinished one; None when it was stopped in an orderly way.
        parts: all parts of a job array; empty unless `state` is "parts".
    """

    uri: str
    state: State
    manifest: Manifest
    folder: Folder
    writer: Process | None = None
    parts: tuple[Part, ...] = ()

    @property
    def artifact(self) -> Artifact:
        """For reading; of an unfinished one what is committed."""
        return Artifact(self.folder, self.manifest)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self.manifest.shards

    @property
    def entries(self) -> tuple[Shard, ...]:
        """Every file: shards, then those beside them."""
        return (*self.manifest.shards, *self.manifest.files)


def look(uri: str) -> Place:
    """What is at `uri`.

    Raises:
        EagleError: no artifact is there, its manifest is unreadable or of a newer schema, or storage fails.
    """
    place = find(uri)
    if place is None:
        raise no_artifact(open_folder(uri))
    return place


def find(uri: str) -> Place | None:
    """`look`, with None for no artifact. Reads the manifest and nothing else of a finished one."""
    folder = open_folder(uri)
    if (data := folder.read(MANIFEST_NAME)) is not None:
        return Place(uri, "complete", parse_manifest(data, uri), folder)
    if (begun := unfinished(uri)) is None:
        return None
    if begun.run.parts is not None:
        return _in_parts(folder, begun, begun.run.parts)
    manifest = _so_far(begun.run, begun.shards, begun.files)
    return Place(uri, "unfinished", manifest, folder, writer=begun.writer)


def _in_parts(folder: Folder, begun: Unfinished, of: int) -> Place:
    names = [part_name(index, of) for index in range(of)]
    places = at_once(lambda name: find(join(folder.uri, name)), names)
    shards = [
        shard.model_copy(update={"path": f"{name}/{shard.path}"})
        for name, place in zip(names, places, strict=True)
        for shard in (place.shards if place else ())
    ]
    parts = tuple(_part(index, place) for index, place in enumerate(places))
    manifest = _so_far(begun.run, shards, ())
    return Place(folder.uri, "parts", manifest, folder, writer=begun.writer, parts=parts)


def _part(index: int, place: Place | None) -> Part:
    if place is None or place.state == "parts":
        return Part(index, "missing")
    rows, size = sum(shard.rows for shard in place.shards), sum(shard.bytes for shard in place.shards)
    return Part(index, place.state, len(place.shards), rows, size)


def _so_far(run: RunRecord, shards: Iterable[Shard], files: Iterable[Shard]) -> Manifest:
    return Manifest(
        kind=run.kind,
        schema_version=max(run.schema_version, 1),
        tool_version="",
        created="",
        config=run.config,
        parents=run.parents,
        target=run.target,
        counts={},
        shards=tuple(shards),
        files=tuple(files),
    )
