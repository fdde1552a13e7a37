"""`_run.json`: what an unfinished artifact is being made from. It is there from first to last."""

from __future__ import annotations

import json
import secrets
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.artifacts.folder import RUN_NAME, Folder
from stages.artifacts.manifest import Kind, Parent, TargetFingerprint, canonical_json
from stages.artifacts.uri import join
from stages.errors import EagleError

RUN_FOLDER = "_run"


class RunRecord(BaseModel):
    """What has to be equal for a run to be continued, and where its claims and records are.

    Attributes:
        generation: names their folder; random, so that nothing that belonged to an earlier artifact here, nor
            a process that still writes it, can be taken for this one's.
        parts: into how many parts a job array divides the work; None for work that is not divided.
        clearing: files of a replaced artifact that are still to be removed, folders with a slash at the end;
            None once they are gone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    schema_version: int
    generation: str
    config: dict[str, Any]
    parents: tuple[Parent, ...]
    target: TargetFingerprint | None
    parts: int | None = None
    clearing: tuple[str, ...] | None = None

    @property
    def of_other_version(self) -> bool:
        """Whether another version of eagle began it, in a form that this one does not continue."""
        return not self.generation

    def to_json(self) -> bytes:
        return canonical_json(self.model_dump(mode="json")) + b"\n"


def new_generation() -> str:
    return secrets.token_hex(8)


def place_of(generation: str, number: int) -> str:
    """The folder of what the holder of a claim writes down."""
    return f"{RUN_FOLDER}/{generation}/{number}"


def generation_of(run: bytes) -> str | None:
    """The generation that a run record names."""
    try:
        content = json.loads(run)
    except ValueError:
        return None
    return content.get("generation") if isinstance(content, dict) else None


def read_run(folder: Folder) -> RunRecord | None:
    """The run record of an unfinished artifact, or None.

    Raises:
        EagleError: there is a file of that name that is none.
    """
    data = folder.read(RUN_NAME)
    if data is None:
        return None
    try:
        return RunRecord.model_validate_json(data)
    except ValidationError:
        if (old := _without_claims(folder, data)) is not None:
            return old
        raise EagleError(
            f"{join(folder.uri, RUN_NAME)} is not a run record of this eagle: choose another output, "
            "or remove the folder"
        ) from None


def _without_claims(folder: Folder, data: bytes) -> RunRecord | None:
    """The run record of an eagle whose records lay in `_records`: enough to refuse or replace it."""
    try:
        content = json.loads(data)
        if content["kind"] not in get_args(Kind) or "process" not in content:
            return None
        paths = [*(content.get("clearing") or ())]
        number = 0
        while (record := folder.read(f"_records/{number}.json")) is not None:
            paths.append(json.loads(record)["shard"]["path"])
            number += 1
        files = json.loads(folder.read("_records/files.json") or b"{}")
        pending = [files["pending"]] if files.get("pending") else []
        paths += [file["path"] for file in (*files.get("files", ()), *pending)]
    except (KeyError, TypeError, ValueError):
        return None
    return RunRecord(
        kind=content["kind"],
        schema_version=0,
        generation="",
        config={},
        parents=(),
        target=None,
        clearing=(*paths, "_records/"),
    )
