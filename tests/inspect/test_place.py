"""Artifacts that are not finished: who writes them, what is committed, which parts are there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_cli.main import main
from stages.artifacts import ArtifactWriter, TargetFingerprint
from stages.artifacts.conversations import Conversation, write_conversations
from stages.inspect.config import InspectConfig
from stages.inspect.place import look
from stages.inspect.result import InspectResult
from stages.inspect.stage import run
from stages.progress import Reporter

ROOT = Path(__file__).parents[2]
CONFIG = {"prompts": ["builtin:chat"], "seed": 0}
WAITING = """
import sys, time
from stages.artifacts import ArtifactWriter
from tests.inspect.test_place import CONFIG, shard
with ArtifactWriter.open(sys.argv[1], "conversations", CONFIG) as writer:
    writer.add_shard("a.parquet", shard(0), rows=2)
    print("committed", flush=True)
    time.sleep(60)
"""


def shard(number: int) -> bytes:
    """Two rows, `0` and `1` of the number."""
    return write_conversations(
        Conversation(
            id=f"{number}-{i}",
            source="builtin:chat",
            license="MIT",
            category="",
            messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            input_ids=[1, 2],
            loss_mask=[0, 1],
            finish_reason="stop",
        )
        for i in range(2)
    )


def write(uri: str, shards: int, *, finish: bool = False, part: tuple[int, int] | None = None) -> None:
    with ArtifactWriter.open(uri, "conversations", CONFIG, part=part) as writer:
        for number in range(shards):
            writer.add_shard(f"{number}.parquet", shard(number), rows=2)
        if finish:
            writer.finish({"rows": 2 * shards})


def inspected(uri: str, **settings: object) -> InspectResult:
    return run(InspectConfig.model_validate({"uri": uri, **settings}), Reporter(quiet=True))


@pytest.mark.parametrize("store", ["local", "memory"])
def test_a_stopped_run_shows_what_it_committed(store: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "out") if store == "local" else f"memory://{tmp_path.name}/stopped"
    write(uri, 2)
    found = inspected(uri, rows=1, row_start=3, verify=True)
    assert (found.state, found.writer, found.digest) == ("unfinished", None, "")
    assert (found.rows, len(found.shards), found.config) == (4, 2, CONFIG)
    assert [source.name for source in found.sources] == ["builtin:chat"]
    assert found.shown is not None
    (row,) = found.shown.rows
    assert not isinstance(row, dict)
    assert row.id == "1-1"


def test_a_living_writer_is_named_and_a_dead_one_is_said_to_have_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = str(tmp_path / "out")
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, uri],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "committed\n"
        writer = inspected(uri).writer
        assert writer is not None
        assert (writer.pid, writer.alive) == (process.pid, True)
        assert main(["inspect", uri]) == 0
        assert f"process {process.pid} on {writer.host} is writing it" in capfd.readouterr().out
    finally:
        process.kill()
        process.wait()
    found = inspected(uri)
    assert found.writer is not None
    assert (found.writer.pid, found.writer.alive) == (process.pid, False)
    assert len(found.shards) == 1
    assert main(["inspect", uri]) == 0
    assert "has ended; the same eagle gen-data command continues it" in capfd.readouterr().out


def test_a_run_that_was_begun_to_replace_an_artifact_shows_none_of_the_old_one(tmp_path: Path) -> None:
    uri = str(tmp_path / "out")
    write(uri, 2, finish=True)
    with ArtifactWriter.open(uri, "conversations", {"seed": 1}, overwrite=True):
        pass
    found = inspected(uri)
    assert (found.state, found.shards, found.config) == ("unfinished", [], {"seed": 1})


def test_parts_of_a_job_array_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    uri = str(tmp_path / "out")
    for part in (0, 1, 3):
        write(uri, 2, finish=True, part=(part, 6))
    write(uri, 1, part=(4, 6))
    found = inspected(uri, rows=2, row_start=3)
    states = ["complete", "complete", "missing", "complete", "unfinished", "missing"]
    assert (found.state, [part.state for part in found.parts]) == ("parts", states)
    assert [part.rows for part in found.parts] == [4, 4, 0, 4, 2, 0]
    assert found.rows == 14
    assert found.shown is not None
    assert [row.id for row in found.shown.rows if not isinstance(row, dict)] == ["1-1", "0-0"]
    assert main(["inspect", uri]) == 0
    lines = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    for line in ("parts complete 0-1, 3", "unfinished 4", "missing 2, 5"):
        assert line in lines
    assert look(f"{uri}/part-00004-of-00006").state == "unfinished"


def test_target_is_shown_where_there_is_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    digest = "0123456789abcdef" * 4
    target = TargetFingerprint(
        name="org/model",
        config=digest,
        tokenizer=digest,
        chat_template=digest,
        weights=digest,
        dtype="float32",
    )
    with ArtifactWriter.open(str(tmp_path), "head", {}, target=target) as writer:
        writer.finish({})
    assert main(["inspect", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert "org/model in float32" in out
    assert "weights 01234567" in out
