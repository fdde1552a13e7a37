"""Whether the files of an artifact are what its manifest says."""

from __future__ import annotations

from pydantic import BaseModel

from stages.artifacts import join
from stages.artifacts.cache import check_entry, missing_entry
from stages.artifacts.manifest import Shard
from stages.errors import EagleError
from stages.inspect.place import Place
from stages.progress import Reporter


class Fault(BaseModel):
    """A file that is not what the manifest says, and in which way: "is missing", "is truncated (...)"."""

    path: str
    problem: str


def check_sizes(place: Place) -> list[Fault]:
    """The files that are missing or have another size; asks for each file's size and reads none."""
    found = []
    sizes = place.folder.sizes([entry.path for entry in place.entries])
    for entry, size in zip(place.entries, sizes, strict=True):
        try:
            if size is None:
                raise missing_entry(place.uri, place.manifest.kind, entry)
            check_entry(place.uri, place.manifest.kind, entry, size)
        except EagleError as error:
            found.append(_fault(place, entry, str(error)))
    return found


def check_digests(place: Place, report: Reporter) -> list[Fault]:
    """The same after reading every file again."""
    found = []
    read, total = 0, sum(entry.bytes for entry in place.entries)
    with report.task("verifying", total=round(total / 1e6), unit="MB") as task:
        for entry, problem in place.artifact.verify_all():
            read += entry.bytes
            task.advance(round(read / 1e6) - task.done)
            if problem is not None:
                found.append(_fault(place, entry, problem))
    return found


def _fault(place: Place, entry: Shard, error: str) -> Fault:
    """The store's error line without the file's name and the advice, which stand beside it once for all."""
    problem = error.removeprefix(f"{join(place.uri, entry.path)} ").partition(": make the artifact again")[0]
    return Fault(path=entry.path, problem=problem)
