"""Artifacts to test with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from stages.artifacts import (
    Artifact,
    ArtifactWriter,
    Kind,
    Parent,
    TargetFingerprint,
    open_artifact,
)
from stages.artifacts.folder import open_folder
from stages.errors import EagleError

TARGET = TargetFingerprint(
    name="a", config="1" * 64, tokenizer="2" * 64, chat_template="3" * 64, weights="4" * 64, dtype="bfloat16"
)


OTHER_TARGET = TARGET.model_copy(update={"name": "b", "chat_template": "5" * 64})


PARENT = Parent(uri="runs/in", kind="conversations", digest="a" * 64)


def stored(name: str, data: bytes) -> str:
    """The name under which a shard of this content is stored."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{hashlib.sha256(data).hexdigest()[:8]}{dot}{suffix}"


PART = stored("part-0.bin", b"0123456789")


def finished(uri: str, kind: Kind = "features", **settings: Any) -> Artifact:
    with ArtifactWriter.open(uri, kind, {"seed": 0} | settings, parents=[PARENT], target=TARGET) as writer:
        writer.add_shard("part-0.bin", b"0123456789", rows=2)
        writer.add_file("target/config.json", b"{}")
        writer.finish({"rows": 2})
    return open_artifact(uri, kind)


def refusal(action: Callable[[], object]) -> str:
    """The one line that `action` is refused with."""
    with pytest.raises(EagleError) as error:
        action()
    line = str(error.value)
    assert "\n" not in line
    return line


def put(uri: str, name: str, data: bytes) -> None:
    open_folder(uri).write(name, data)
