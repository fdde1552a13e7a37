"""Artifacts: folders of shards with a manifest that is written last, at a local path or an fsspec URI."""

from stages.artifacts.artifact import Artifact, Verify, artifact_state, open_artifact
from stages.artifacts.cache import Held, cache_folder
from stages.artifacts.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSIONS,
    STAGE_OF_KIND,
    Kind,
    Manifest,
    Parent,
    Shard,
    TargetFingerprint,
)
from stages.artifacts.merging import merge_parts
from stages.artifacts.parts import part_name
from stages.artifacts.unfinished import Unfinished, unfinished
from stages.artifacts.uri import filesystem, free_bytes, join
from stages.artifacts.writer import ArtifactWriter, CommittedShard, refuse_output

__all__ = [
    "MANIFEST_NAME",
    "SCHEMA_VERSIONS",
    "STAGE_OF_KIND",
    "Artifact",
    "ArtifactWriter",
    "CommittedShard",
    "Held",
    "Kind",
    "Manifest",
    "Parent",
    "Shard",
    "TargetFingerprint",
    "Unfinished",
    "Verify",
    "artifact_state",
    "cache_folder",
    "filesystem",
    "free_bytes",
    "join",
    "merge_parts",
    "open_artifact",
    "part_name",
    "refuse_output",
    "unfinished",
]
