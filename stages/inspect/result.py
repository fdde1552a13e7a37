"""What `eagle inspect` found; `--json` prints it, and docs/cli.md documents its fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from stages.artifacts import Kind, Shard, TargetFingerprint
from stages.inspect.conversation_rows import ConversationRow
from stages.inspect.feature_rows import FeatureRow
from stages.inspect.lineage import Ancestor
from stages.inspect.sources import Source
from stages.inspect.verification import Fault

if TYPE_CHECKING:
    from rich.console import RenderableType


class WriterFound(BaseModel):
    """Who makes an unfinished artifact; `alive` is null where that cannot be seen, on another host."""

    host: str
    pid: int
    alive: bool | None


class PartFound(BaseModel):
    """A part of a job array."""

    index: int
    state: Literal["complete", "unfinished", "missing"]
    shards: int
    rows: int
    bytes: int


class Checked(BaseModel):
    """What was compared with the manifest: sizes always, digests with --verify."""

    digests: bool
    files: int
    bytes: int
    faults: list[Fault]


class Rows(BaseModel):
    """The rows that were asked for.

    Attributes:
        note: which they are, or whose tokenizer gave their text.
        totals: a head's metrics.json, a report's report.json without its requests; else empty.
        rows: of conversations and features; a head's lines of metrics.jsonl; a report's requests.
    """

    note: str
    totals: dict[str, Any] = {}
    rows: list[ConversationRow | FeatureRow | dict[str, Any]]


class InspectResult(BaseModel):
    """An artifact.

    Attributes:
        created, tool_version, digest: "" while it is unfinished or in parts.
        rows, bytes: over all shards; over all shards and files.
        sources: what it was made from besides its parents.
        writer: who makes it; null for a finished artifact and for a run that was stopped.
        shown: what --rows and --row ask for.
    """

    uri: str
    state: Literal["complete", "unfinished", "parts"]
    kind: Kind
    schema_version: int
    tool_version: str
    created: str
    digest: str
    rows: int
    bytes: int
    counts: dict[str, Any]
    config: dict[str, Any]
    target: TargetFingerprint | None
    shards: list[Shard]
    files: list[Shard]
    parents: list[Ancestor]
    sources: list[Source]
    writer: WriterFound | None
    parts: list[PartFound]
    checked: Checked
    shown: Rows | None

    def summary(self) -> RenderableType:
        from stages.inspect.page import page

        return page(self)
