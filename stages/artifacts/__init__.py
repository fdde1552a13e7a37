"""Artifacts: folders of shards with a manifest that is written last, at a local path or an fsspec URI."""

from stages.artifacts.cache import cache_folder
from stages.artifacts.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    STAGE_OF_KIND,
    Kind,
    Manifest,
    Parent,
    Shard,
    TargetFingerprint,
)
from stages.artifacts.store import Artifact, ArtifactWriter, CommittedShard, artifact_state, open_artifact
from stages.artifacts.uri import filesystem, join

__all__ = [
    "MANIFEST_NAME",
    "SCHEMA_VERSION",
    "STAGE_OF_KIND",
    "Artifact",
    "ArtifactWriter",
    "CommittedShard",
    "Kind",
    "Manifest",
    "Parent",
    "Shard",
    "TargetFingerprint",
    "artifact_state",
    "cache_folder",
    "filesystem",
    "join",
    "open_artifact",
]
