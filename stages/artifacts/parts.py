"""Parts of a job array: artifacts of their own, in folders of the whole one, until they are merged."""

from __future__ import annotations

from stages.artifacts.folder import Folder, at_once
from stages.artifacts.manifest import MANIFEST_NAME, parse_manifest


def part_name(number: int, of: int) -> str:
    """The folder of part `number`, counted from 0."""
    return f"part-{number:05d}-of-{of:05d}"


def part_folders(folder: Folder, of: int) -> list[Folder]:
    return [folder.below(part_name(number, of)) for number in range(of)]


def dissolve_parts(folder: Folder, of: int) -> None:
    """Removes of merged parts what is not theirs any more: all but the shards, the manifest last.

    A part whose manifest is gone has been through this, so it can be done again.
    """
    at_once(_dissolve, part_folders(folder, of))


def _dissolve(part: Folder) -> None:
    if (data := part.read(MANIFEST_NAME)) is not None:
        part.remove_each([file.path for file in parse_manifest(data, part.uri).files])
        part.remove(MANIFEST_NAME)
