"""The stages chained as a user chains them, on a tiny random target; every artifact on an object store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_cli.main import main
from stages.artifacts import open_artifact
from tests.tiny import write_jsonl

SMALL = ["--device", "cpu", "--dtype", "float32", "--json", "--quiet"]


def eagle(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """Run one stage in this process; its result object."""
    capfd.readouterr()
    code = main(list(arguments))
    out, err = capfd.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_every_stage_reads_what_the_one_before_it_wrote(
    tiny_path: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = "memory://pipeline"
    topics = ("rivers", "bridges", "lamps", "clouds", "violins", "maps", "kites", "bread")
    prompts = write_jsonl(
        tmp_path / "prompts.jsonl",
        [{"turns": [f"Tell me about {topic} and mail me at jo@example.com", "Go on."]} for topic in topics],
    )
    made = eagle(
        capfd, "gen-data", "--target", tiny_path, "--prompts", str(prompts), "--max-new-tokens", "24",
        "--output", f"{run}/conversations", *SMALL,
    )  # fmt: skip
    assert made["rows"] == len(topics)
    assert made["pii"] == {"EMAIL_ADDRESS": len(topics)}
    eagle(
        capfd, "extract-features", "--target", tiny_path, "--conversations", f"{run}/conversations",
        "--output", f"{run}/features", *SMALL,
    )  # fmt: skip
    eagle(
        capfd, "train", "--features", f"{run}/features", "--output", f"{run}/head", "--epochs", "20",
        "--batch-tokens", "64", "--holdout", "0", "--draft-vocab-size", "512", *SMALL,
    )  # fmt: skip
    eagle(
        capfd, "bench", "--target", tiny_path, "--head", f"{run}/head", "--prompts", str(prompts),
        "--max-new-tokens", "24", "--num-prompts", "4", "--tree", "dynamic:min_prob=0,expand_prob=0",
        "--output", f"{run}/bench", *SMALL,
    )  # fmt: skip

    report = open_artifact(f"{run}/bench", "report")
    measured = json.loads(report.read("report.json"))
    assert measured["lossless"]["faults"] == 0
    assert measured["lossless"]["near_ties"] == 0  # float32
    assert measured["pooled"]["accepted_per_step"] > 0.05  # chance would be about 0.02
    head = open_artifact(f"{run}/head", "head")
    features = open_artifact(f"{run}/features", "features")
    conversations = open_artifact(f"{run}/conversations", "conversations")
    for child, parent in [(report, head), (head, features), (features, conversations)]:
        assert [p.digest for p in child.manifest.parents] == [parent.manifest.digest]
        assert child.manifest.target == conversations.manifest.target
