"""Parents are found where they were, and where they are after a move; what is not the same is told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts import ArtifactWriter, Manifest, open_artifact
from stages.inspect.lineage import Ancestor, lineage, places
from stages.inspect.sources import Source, maker, sources

NAMES = st.sampled_from(["run", "a", "features", "head", "data"])
PATHS = st.lists(NAMES, min_size=1, max_size=3)


def make(uri: str, kind: str = "features", seed: int = 0) -> None:
    with ArtifactWriter.open(uri, kind, {"seed": seed}, overwrite=True) as writer:
        writer.finish({"rows": 3})


def child(uri: str, parent: str) -> Manifest:
    with ArtifactWriter.open(uri, "head", {}, parents=[open_artifact(parent, "features").parent()]) as writer:
        return writer.finish({})


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """run/features, and run/head made from it, in the current folder."""
    monkeypatch.chdir(tmp_path)
    make("run/features")
    return child("run/head", "run/features")


def only(found: list[Ancestor]) -> Ancestor:
    (ancestor,) = found
    return ancestor


@given(
    old=st.sampled_from(["/data/x", "runs", "gs://bucket/old"]),
    new=st.sampled_from(["/mnt/y", "elsewhere/z", "memory://b/new", "gs://other/deep/new"]),
    own=PATHS,
    parent=PATHS,
)
def test_a_parent_that_moved_together_with_its_child_is_looked_for_in_the_new_place(
    old: str, new: str, own: list[str], parent: list[str]
) -> None:
    looked = [str(place) for place in places("/".join([old, *parent]), "/".join([new, *own]))]
    moved = "/".join([new, *parent])
    assert looked[0] == "/".join([old, *parent])
    assert own == parent or moved in looked  # an artifact is not its own parent
    assert len(set(looked)) == len(looked) <= 10


def test_an_unchanged_parent_is_found_where_it_was(family: Manifest) -> None:
    found = only(lineage("run/head", family))
    assert (found.state, found.found_at, found.counts) == ("unchanged", "run/features", {"rows": 3})


def test_a_replaced_parent_is_told_with_both_digests(family: Manifest) -> None:
    make("run/features", seed=1)
    found = only(lineage("run/head", family))
    now = open_artifact("run/features", "features").manifest.digest
    assert (found.state, found.found_digest, found.digest) == ("changed", now, family.parents[0].digest)
    assert found.counts == {}


def test_the_one_with_the_recorded_digest_is_taken_whatever_lies_at_the_recorded_place(
    family: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "run").rename(tmp_path / "kept")
    make("run/features", seed=1)
    found = only(lineage("kept/head", family))
    assert (found.state, found.found_at) == ("unchanged", "kept/features")


def test_another_artifact_beside_a_moved_child_is_not_taken_for_its_parent(
    family: Manifest, tmp_path: Path
) -> None:
    (tmp_path / "run").rename(tmp_path / "kept")
    make("kept/features", seed=1)
    assert only(lineage("kept/head", family)).state == "missing"


def test_a_parent_that_is_made_again_or_unreadable_is_said_to_be(family: Manifest) -> None:
    with ArtifactWriter.open("run/features", "features", {"seed": 2}, overwrite=True):
        pass
    assert only(lineage("run/head", family)).state == "unfinished"
    Path("run/features/manifest.json").write_text("{")
    found = only(lineage("run/head", family))
    assert found.state == "unreadable"
    assert "is not JSON" in found.problem


@pytest.mark.parametrize(
    ("config", "counts", "expected"),
    [
        (
            {"prompts": ["a.jsonl=2", "b"], "source_license": ["b=MIT"]},
            {
                "sources": {
                    "a.jsonl": {"read": 9, "kept": 7, "empty": 2, "license": "CC0-1.0"},
                    "b": {"read": 4, "kept": 4},
                }
            },
            [
                Source(name="a.jsonl", rows=7, read=9, left_out={"empty": 2}, license="CC0-1.0"),
                Source(name="b", rows=4, read=4, license="MIT"),
            ],
        ),
        ({"prompts": ["builtin:chat"]}, {}, [Source(name="builtin:chat")]),
        ({"prompts": [{"name": "gsm8k", "prompts": 40, "sha256": "0"}]}, {}, [Source(name="gsm8k", rows=40)]),
        ({"prompts": "odd", "source_license": 3}, {"sources": {"c": "odd"}}, [Source(name="c")]),
        ({"format": "specforge"}, {"source": "hs/"}, [Source(name="hs/")]),
    ],
)
def test_sources_are_read_from_counts_and_settings(
    config: dict[str, object], counts: dict[str, object], expected: list[Source]
) -> None:
    manifest = Manifest.model_validate(
        {
            "kind": "conversations",
            "schema_version": 1,
            "tool_version": "",
            "created": "",
            "config": config,
            "parents": [],
            "target": None,
            "counts": counts,
            "shards": [],
            "files": [],
        }
    )
    assert sources(manifest) == expected


def test_what_was_converted_is_made_again_by_converting() -> None:
    assert maker("features", {"format": "specforge", "source_digest": "0"}) == "convert"
    assert maker("features", {"shard_bytes": 1}) == "extract-features"
