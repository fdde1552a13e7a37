"""The names under which the stages know the store."""

from stages.artifacts.artifact import Artifact, artifact_state, open_artifact
from stages.artifacts.writer import ArtifactWriter, CommittedShard

__all__ = ["Artifact", "ArtifactWriter", "CommittedShard", "artifact_state", "open_artifact"]
