"""Heads as artifacts."""

from __future__ import annotations

from stages.artifacts import ArtifactWriter


def write_head(uri: str, files: dict[str, bytes]) -> str:
    with ArtifactWriter.open(uri, "head", {}, overwrite=True) as writer:
        for name, data in files.items():
            writer.add_file(name, data)
        writer.finish({})
    return uri
