"""Runs that were killed, done already, or shared out over a job array."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from stages.artifacts import artifact_state, open_artifact
from stages.features.layout import read_target_weights
from tests.extract_features.extracting import (
    CONTEXT,
    MASKS,
    conversations,
    extract,
    manifest_of,
    refusal,
    rows_of,
)

KILLED_RUN = """
import json, os, signal, sys
from stages.extract_features import stage
from stages.extract_features.config import ExtractFeaturesConfig
from stages.progress import Reporter, Task

advance = Task.advance
def killing(self, count=1):
    advance(self, count)
    if self.done > self.total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

Task.advance = killing
stage.run(ExtractFeaturesConfig(**json.loads(sys.argv[1])), Reporter(quiet=True))
"""


def test_a_killed_run_continues_to_what_an_uninterrupted_one_makes(
    target: Path, source: str, tmp_path: Path
) -> None:
    settings = {"forward_tokens": 40, "shard_bytes": 6_000, "dtype": "float32", "device": "cpu"}
    names = {"target": str(target), "conversations": source, "output": str(tmp_path / "killed")}
    command = [sys.executable, "-c", KILLED_RUN, json.dumps(settings | names)]
    # With as many threads as the runs below: another number may add up in another order.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert artifact_state(str(tmp_path / "killed")) == "partial"
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("features-*")}
    assert before

    extract(target, source, tmp_path / "killed", **settings)
    extract(target, source, tmp_path / "whole", **settings)
    resumed, whole = (manifest_of(tmp_path / name) for name in ("killed", "whole"))
    assert resumed.shards == whole.shards
    assert resumed.digest == whole.digest
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("features-*")}
    committed = sorted(before.items())[:-1]  # the last one may have been written and not yet recorded
    assert set(committed) < set(after.items())


def test_a_complete_artifact_is_left_alone(target: Path, source: str, tmp_path: Path) -> None:
    first = extract(target, source, tmp_path / "f")
    changed = (tmp_path / "f" / "manifest.json").stat().st_mtime_ns
    again = extract(target, source, tmp_path / "f")
    assert (tmp_path / "f" / "manifest.json").stat().st_mtime_ns == changed
    assert again.model_copy(update={"seconds": first.seconds}) == first
    assert "already complete" in again.summary()


def test_parts_of_a_job_array_become_the_whole_without_the_target(
    target: Path, source: str, tmp_path: Path
) -> None:
    settings = {"forward_tokens": 40, "shard_bytes": 6_000}
    parts = [
        extract(target, source, tmp_path / "f", shard_index=index, num_shards=3, **settings)
        for index in (2, 0, 1)
    ]
    assert [(tmp_path / "f" / f"part-0000{n}-of-00003" / "target").exists() for n in range(3)] == [1, 0, 0]
    joined = extract(Path("not-there"), source, tmp_path / "f", num_shards=3, **settings)
    whole = extract(target, source, tmp_path / "whole", **settings)
    assert joined.model_dump(exclude={"output", "shards", "bytes", "seconds"}) == whole.model_dump(
        exclude={"output", "shards", "bytes", "seconds"}
    )
    assert joined.shards == sum(part.shards for part in parts)
    assert manifest_of(tmp_path / "f").config == manifest_of(tmp_path / "whole").config
    made, expected = rows_of(tmp_path / "f"), rows_of(tmp_path / "whole")
    assert made.keys() == expected.keys()
    for number, row in made.items():
        assert row.input_ids.tolist() == expected[number].input_ids.tolist()
        torch.testing.assert_close(row.aux, expected[number].aux, rtol=1e-5, atol=1e-5)
    weights = read_target_weights(open_artifact(str(tmp_path / "f"), "features"))
    assert weights["norm.weight"].shape == (32,)
    again = extract(Path("not-there"), source, tmp_path / "f", num_shards=3, **settings)
    assert again.rows == joined.rows


def test_tokens_are_shared_out_over_a_job_array(target: Path, source: str, tmp_path: Path) -> None:
    settings = {"max_tokens": 60, "num_shards": 2}
    taken = [extract(target, source, tmp_path / "f", shard_index=n, **settings).tokens for n in range(2)]
    assert max(taken) <= 30 < 2 * min(taken)
    joined = extract(target, source, tmp_path / "f", **settings)
    assert joined.tokens + joined.left_out_rows > sum(taken) == joined.tokens


def test_parts_that_are_missing_or_were_made_otherwise_are_named(
    target: Path, source: str, tmp_path: Path
) -> None:
    assert "none of the 2 parts" in refusal(target, source, tmp_path / "f", num_shards=2)
    extract(target, source, tmp_path / "f", shard_index=1, num_shards=2)
    assert "--shard-index 0" in refusal(target, source, tmp_path / "f", num_shards=2)
    extract(target, source, tmp_path / "f", shard_index=0, num_shards=2)
    message = refusal(target, source, tmp_path / "f", num_shards=2, max_length=20)
    assert f"were made with --max-length {CONTEXT}, not 20" in message
    message = refusal(target, source, tmp_path / "f", num_shards=2, layers="1,2,3")
    assert "were made with --layers 2,4,5, not 1,2,3" in message
    other = conversations(tmp_path / "c", target, MASKS[:5])
    assert "other" in refusal(target, other, tmp_path / "f", num_shards=2)
    assert extract(target, source, tmp_path / "f", num_shards=2).rows == len(MASKS) - 1
