"""The manifest: what an artifact is, what it was made from, and the digest of every file in it.

A manifest is written last, so a folder without one is not an artifact. Only pydantic is imported here.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from stages.config import several
from stages.errors import EagleError

MANIFEST_NAME = "manifest.json"

Kind = Literal["conversations", "features", "head", "report"]

SCHEMA_VERSIONS: dict[Kind, int] = {"conversations": 1, "features": 2, "head": 1, "report": 1}
"""What this eagle writes, and the newest it reads; it reads the older ones too."""

STAGE_OF_KIND: dict[Kind, str] = {
    "conversations": "gen-data",
    "features": "extract-features",
    "head": "train",
    "report": "bench",
}
"""The subcommand that makes each kind; error messages name it."""

_TARGET_PARTS = ("config", "tokenizer", "chat_template", "weights", "dtype")


def check_path(path: str) -> str:
    """Returns `path` if it names a file below an artifact's folder that is not one of the store's own.

    Raises:
        ValueError: it is empty, absolute, climbs out of the folder, is not in plain form, or is reserved
            (`manifest.json`, or a first part that begins with an underscore).
    """
    parts = path.split("/")
    plain = bool(path) and "\\" not in path and "\0" not in path
    if not plain or any(part in ("", ".", "..") for part in parts) or str(PurePosixPath(path)) != path:
        raise ValueError(f"{path!r} is not a plain relative path")
    if path == MANIFEST_NAME or path.startswith("_"):
        raise ValueError(f"{path!r} is a name that the artifact itself uses")
    return path


_Path = Annotated[str, AfterValidator(check_path)]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetFingerprint(_Record):
    """What a target must share with an artifact for the two to be used together.

    Attributes:
        name: how the target was named when the artifact was made; says nothing about equality.
        config, tokenizer, chat_template, weights: sha256 hex digests.
        dtype: the number format the target ran in, such as "bfloat16".
    """

    name: str
    config: str
    tokenizer: str
    chat_template: str
    weights: str
    dtype: str

    def mismatch(self, other: TargetFingerprint) -> list[str]:
        """The parts in which the two differ, such as `["chat_template"]`; the name is not compared."""
        return [part for part in _TARGET_PARTS if getattr(self, part) != getattr(other, part)]


class Parent(_Record):
    """An artifact that another was made from: its place, as the user typed it, and its manifest's digest."""

    uri: str
    kind: Kind
    digest: _Sha256


class Shard(_Record):
    """One file of an artifact, its path relative to the artifact; `rows` is 0 for what holds no rows."""

    path: _Path
    rows: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: _Sha256


class Manifest(_Record):
    """The record that makes a folder an artifact.

    Attributes:
        config: the stage's settings that decide the result.
        counts: what the stage counted, such as rows and tokens.
        shards: the data, in the order it was committed.
        files: everything else, sorted by path.
        created: UTC time in ISO 8601; like `tool_version` no part of the digest.
    """

    kind: Kind
    schema_version: int = Field(ge=1)
    tool_version: str
    created: str
    config: dict[str, Any]
    parents: tuple[Parent, ...]
    target: TargetFingerprint | None
    counts: dict[str, int | float | str | dict[str, Any]]
    shards: tuple[Shard, ...]
    files: tuple[Shard, ...]

    @model_validator(mode="after")
    def _paths_are_distinct(self) -> Manifest:
        paths = [entry.path for entry in (*self.shards, *self.files)]
        if len(set(paths)) != len(paths):
            raise ValueError("two entries have the same path")
        return self

    @property
    def digest(self) -> str:
        """sha256 of the manifest as canonical JSON, without the time, the tool's version, and how inputs and
        the target were named.

        Equal digests mean equal settings, inputs and content, wherever they were made.
        """
        content = self.model_dump(mode="json", exclude={"created", "tool_version"})
        for parent in content["parents"]:
            del parent["uri"]
        if content["target"]:
            del content["target"]["name"]
        return hashlib.sha256(canonical_json(content)).hexdigest()

    def to_json(self) -> bytes:
        """The file's text: indented UTF-8 JSON.

        Raises:
            ValueError: a count or a setting is NaN or infinite, which JSON does not have.
        """
        content = self.model_dump(mode="json")
        return (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def canonical_json(content: Any) -> bytes:
    """`content` as JSON with sorted keys and no spaces: equal values give equal bytes.

    Raises:
        TypeError: it holds something JSON has no form for.
        ValueError: it holds NaN or infinity.
    """
    return json.dumps(
        content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def parse_manifest(data: bytes, uri: str) -> Manifest:
    """Reads the manifest of the artifact at `uri`.

    Raises:
        EagleError: it is not JSON, is of a newer schema, or has missing, wrong or unknown fields.
    """
    where = f"{uri}/{MANIFEST_NAME}"
    try:
        content = json.loads(data)
    except ValueError:
        raise EagleError(
            f"{where} is not JSON ({several(len(data), 'byte')}): make the artifact again"
        ) from None
    if not isinstance(content, dict):
        raise EagleError(f"{where} is not an artifact's manifest: it holds no JSON object")
    version, kind = content.get("schema_version"), content.get("kind")
    known = SCHEMA_VERSIONS.get(kind) if isinstance(kind, str) else None  # type: ignore[call-overload]
    if known is not None and isinstance(version, int) and version > known:
        raise EagleError(
            f"{where} is of schema {version} and this eagle reads {kind} up to {known}: "
            "upgrade eagle, or make the artifact again"
        )
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        raise EagleError(f"{where} is not an artifact's manifest: {_first_fault(error)}") from None


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    field = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"unknown field {field}"
    if fault["type"] == "missing":
        return f"no field {field}"
    return f"{field}: {fault['msg']}" if field else str(fault["msg"])
