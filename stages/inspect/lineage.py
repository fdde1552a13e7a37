"""What an artifact was made from, back to the prompts, and whether each ancestor is still the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel

from stages.artifacts import Kind, Manifest, Parent, join
from stages.artifacts.uri import local_path
from stages.errors import EagleError
from stages.inspect.place import Place, find
from stages.inspect.sources import Source, sources

MOVED_WITHIN = 3
"""How many folders above an artifact its parents are looked for when they are not where they were."""

AncestorState = Literal["unchanged", "changed", "unfinished", "missing", "unreadable"]


class Ancestor(BaseModel):
    """An input of an artifact, and its own.

    Attributes:
        uri: where it was when the artifact was made.
        digest: of the manifest that it had then.
        state: whether it is still there. "unchanged" has the digest; "changed" is another artifact, with
            `found_digest`; "unfinished" is one that is being made at that place; "unreadable" with `problem`.
        found_at: where it is now, None unless it is "unchanged" or "changed".
        counts, parents, sources: of the artifact that was found, empty unless it is the same.
    """

    uri: str
    kind: Kind
    digest: str
    state: AncestorState
    found_at: str | None = None
    found_digest: str | None = None
    problem: str = ""
    counts: dict[str, Any] = {}
    parents: list[Ancestor] = []
    sources: list[Source] = []


def lineage(uri: str, manifest: Manifest) -> list[Ancestor]:
    """The parents of the artifact at `uri`, with all their own.

    A parent is looked for where it was, and where it would be if it had moved together with the artifact:
    runs/a/features of a head that is now at /data/a/head is also looked for at /data/a/features. What has the
    recorded digest is it, wherever it lies; what has another one counts only at the recorded place. Only
    manifests are read.
    """
    return [_ancestor(parent, uri) for parent in manifest.parents]


def _ancestor(parent: Parent, child: str) -> Ancestor:
    known = Ancestor(uri=parent.uri, kind=parent.kind, digest=parent.digest, state="missing")
    # What is on this machine is asked first: a bucket may take ten seconds to say that it cannot be reached.
    for uri in sorted(places(parent.uri, child), key=lambda uri: local_path(uri) is None):
        recorded = uri == parent.uri
        try:
            place = find(uri)
        except EagleError as error:
            if recorded:
                known = known.model_copy(update={"state": "unreadable", "problem": str(error)})
            continue
        if place is None:
            continue
        if place.state == "complete" and place.manifest.digest == parent.digest:
            return known.model_copy(
                update={
                    "state": "unchanged",
                    "found_at": uri,
                    "found_digest": parent.digest,
                    "problem": "",
                    "counts": dict(place.manifest.counts),
                    "parents": lineage(uri, place.manifest),
                    "sources": sources(place.manifest),
                }
            )
        if recorded:
            known = known.model_copy(update=_other(place))
    return known


def _other(place: Place) -> dict[str, Any]:
    if place.state != "complete":
        return {"state": "unfinished"}
    return {"state": "changed", "found_at": place.uri, "found_digest": place.manifest.digest}


def places(parent: str, child: str) -> Iterator[str]:
    """Where a parent may be, the recorded place first."""
    seen = {_normal(parent), _normal(child)}
    yield parent
    names = [name for name in parent.partition("://")[2 if "://" in parent else 0].split("/") if name]
    for above in range(1, MOVED_WITHIN + 1):
        folder = _above(child, above)
        if folder is None:
            return
        for kept in range(1, MOVED_WITHIN + 1):
            uri = join(folder, *names[-kept:]).removeprefix("./")
            if kept <= len(names) and _normal(uri) not in seen:
                seen.add(_normal(uri))
                yield uri


def _above(uri: str, levels: int) -> str | None:
    """The folder `levels` above an artifact's, None where the bucket ends; a relative path stays one."""
    local = local_path(uri)
    if local is not None:
        return os.path.normpath(os.path.join(local, *[os.pardir] * levels))
    scheme, _, path = uri.partition("://")
    names = path.rstrip("/").split("/")
    return f"{scheme}://{'/'.join(names[:-levels])}" if levels < len(names) else None


def _normal(uri: str) -> str:
    local = local_path(uri)
    return uri.rstrip("/") if local is None else str(local.absolute())
