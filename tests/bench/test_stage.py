"""Claims about the stage as a whole, on a tiny target and a head with random weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eagle_cli.catalog import STAGES
from eagle_cli.execution import execute
from stages.artifacts import artifact_state, open_artifact
from stages.bench import stage
from stages.bench.config import BenchConfig
from stages.bench.report import BenchReport
from stages.decoding import DraftTree, EagleModel, SamplingParams, engine
from stages.errors import EagleError
from stages.progress import Reporter
from stages.targets import Target
from tests.tiny import make_tiny_target, write_jsonl

QUIET = Reporter(quiet=True)
TREE = "dynamic:depth=1,width=60,nodes=60,min_prob=0.0,expand_prob=0.0"  # drafts so much that some is right
PROMPTS = [
    {"id": "one", "prompt": "write a line"},
    {"id": "two", "turns": ["first do this", "then do that"]},
    {"id": "long", "turns": ["too long " * 100, "never asked"]},
    {"id": "last", "prompt": "the last one"},
]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "more").mkdir()
    first = write_jsonl(folder / "chat.jsonl", PROMPTS)
    second = write_jsonl(folder / "more" / "chat.jsonl", [{"id": "one", "prompt": "something else"}])
    return [str(first), str(second)]


@pytest.fixture
def settings(target_folder: Path, head_uri: str, sets: list[str], tmp_path: Path) -> dict[str, Any]:
    return {
        "target": str(target_folder),
        "head": head_uri,
        "prompts": sets,
        "output": str(tmp_path / "report"),
        "max_new_tokens": 10,
        "tree": TREE,
        "device": "cpu",
        "dtype": "float32",
    }


def bench(settings: dict[str, Any], **changes: Any) -> stage.BenchResult:
    return stage.run(BenchConfig(**(settings | changes)), QUIET)


def report_of(output: str) -> dict[str, Any]:
    return json.loads(open_artifact(output, "report").read("report.json"))


def test_a_float32_run_is_identical_throughout_and_reports_every_set(
    settings: dict[str, Any], target: Target
) -> None:
    result = bench(settings)
    report = report_of(settings["output"])
    assert list(report["sets"]) == ["chat", "chat-2"]
    chat, pooled = report["sets"]["chat"], report["pooled"]
    assert (chat["prompts"], chat["requests"], chat["skipped"]) == (3, 4, 2)
    assert (pooled["prompts"], pooled["requests"], pooled["skipped"]) == (4, 5, 2)
    for numbers in (chat, pooled):
        assert numbers["plain"]["tokens"] == numbers["eagle"]["tokens"]
        assert numbers["speedup"] == pytest.approx(
            numbers["eagle"]["tokens_per_s"] / numbers["plain"]["tokens_per_s"]
        )
    assert pooled["accepted_per_step"] > 0
    assert pooled["tokens_per_step"] > 1
    lossless = report["lossless"]
    assert (lossless["requests"], lossless["identical"]) == (5, 5)
    assert (lossless["near_ties"], lossless["faults"], lossless["divergences"]) == (0, 0, [])
    assert lossless["float32"] == {"prompts": 4, "identical": 4}
    assert report["settings"]["tree"] == TREE
    assert report["settings"]["dtype"] == "float32"
    assert report["hardware"]["torch"] == torch.__version__
    assert [(each["set"], each["prompt_id"], each["turn"]) for each in report["requests"]] == [
        ("chat", "one", 0),
        ("chat", "two", 0),
        ("chat", "two", 1),
        ("chat", "last", 0),
        ("chat-2", "one", 0),
    ]
    assert BenchReport.model_validate(report).pooled == result.pooled


def records(output: str) -> list[dict[str, Any]]:
    report = open_artifact(output, "report")
    shards = [shard.path for shard in report.manifest.shards if shard.path.startswith("requests-")]
    return [json.loads(line) for path in shards for line in report.read(path).splitlines()]


def test_a_later_turn_continues_the_plain_answer(settings: dict[str, Any], target: Target) -> None:
    bench(settings, num_prompts=2)
    two = records(settings["output"])[1]
    model = EagleModel(target)
    first = model.generate("first do this", SamplingParams(max_new_tokens=10))
    history = [
        {"role": "user", "content": "first do this"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "then do that"},
    ]
    assert two["requests"][0]["plain"]["token_ids"] == first.token_ids
    assert two["requests"][1]["prompt_ids"] == target.render(history)


def test_at_a_temperature_the_sampled_text_is_the_same_too(settings: dict[str, Any]) -> None:
    result = bench(settings, temperature=0.8, seed=3)
    assert result.lossless.identical == result.lossless.requests == 5


def test_a_bfloat16_run_is_explained_and_checked_in_float32(settings: dict[str, Any]) -> None:
    result = bench(settings, dtype="bfloat16", check_float32=2, near_tie_gap=2.0)
    assert result.lossless.identical + result.lossless.near_ties == result.lossless.requests
    assert (result.lossless.float32.prompts, result.lossless.float32.identical) == (2, 2)
    assert report_of(settings["output"])["settings"]["dtype"] == "bfloat16"


walk = engine.walk


def lossy(tree: DraftTree, drawn: Sequence[int]) -> tuple[list[int], int]:
    """Accepts the best draft whether the target agrees or not."""
    path, bonus = walk(tree, drawn)
    return (path, bonus) if tree.drafted == 0 or len(path) > 1 else ([0, 1], drawn[1])


def test_a_lossy_verifier_is_caught_and_the_report_still_written(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "walk", lossy)
    command = next(each for each in STAGES if each.name == "bench")
    changes = {"dtype": "bfloat16", "check_float32": 1, "num_prompts": 1}
    assert execute(command, settings | changes, as_json=False, quiet=True) == 1
    message = capfd.readouterr().err.splitlines()[-1]
    assert "answers are not the target's own" in message
    assert "report.json" in message
    lossless = report_of(settings["output"])["lossless"]
    assert lossless["faults"] > 0
    assert lossless["float32"]["identical"] == 0
    causes = {each["cause"] for each in lossless["divergences"]}
    assert "wide_gap" in causes
    assert "float32" in causes
    with pytest.raises(EagleError, match="are not the target's own"):
        bench(settings, **changes)


KILLED_RUN = """
import json, os, signal, sys
from stages.bench import journal, stage
from stages.bench.config import BenchConfig
from stages.progress import Reporter, Task

journal.COMMIT_SECONDS = 0
advance = Task.advance
def killing(self, count=1):
    advance(self, count)
    if self.description == sys.argv[2] and self.done == 2:
        os.kill(os.getpid(), signal.SIGKILL)

Task.advance = killing
stage.run(BenchConfig(**json.loads(sys.argv[1])), Reporter(quiet=True))
"""


@pytest.mark.parametrize("phase", ["prompts", "float32 check"])
def test_a_killed_run_continues_behind_what_it_has_measured(settings: dict[str, Any], phase: str) -> None:
    if phase == "float32 check":
        settings |= {"dtype": "bfloat16", "near_tie_gap": 2.0, "check_float32": 3, "max_new_tokens": 5}
    done = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, json.dumps(settings), phase],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert artifact_state(settings["output"]) == "partial"
    before = {path.name: path.read_bytes() for path in Path(settings["output"]).glob("*.jsonl")}
    assert len(before) == (2 if phase == "prompts" else 5 + 2)
    bench(settings)
    after = {path.name: path.read_bytes() for path in Path(settings["output"]).glob("*.jsonl")}
    assert before.items() < after.items()
    assert [record["prompt_id"] for record in records(settings["output"])] == [
        "one",
        "two",
        "long",
        "last",
        "one",
    ]
    checked = 3 if phase == "float32 check" else 4
    assert report_of(settings["output"])["lossless"]["float32"] == {"prompts": checked, "identical": checked}


def test_a_complete_report_is_read_again_and_nothing_else(settings: dict[str, Any]) -> None:
    first = bench(settings, num_prompts=1)
    again = bench(settings, num_prompts=1)
    assert again.model_copy(update={"seconds": first.seconds}) == first
    assert "already complete" in shown(again)
    with pytest.raises(EagleError, match="made with other settings"):
        bench(settings, num_prompts=2)


def shown(result: stage.BenchResult) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(result.summary())
    return capture.get()


def test_the_summary_says_how_fast_how_same_and_where(settings: dict[str, Any]) -> None:
    result = bench(settings)
    text = shown(result)
    for row in (*result.sets.values(), result.pooled):
        assert f"{row.speedup:.2f}x" in text
        assert f"{row.plain.tokens_per_s:,.1f}" in text
    assert "Same text: all 5 answers are the same, token for token, in float32." in text
    assert "2 turns are left out: the prompt does not fit the target's context." in text
    assert result.report.replace("\n", "") in text.replace("\n", "")


def test_the_result_is_one_json_object(settings: dict[str, Any]) -> None:
    result = bench(settings, num_prompts=1)
    assert json.loads(result.model_dump_json())["pooled"]["speedup"] == result.pooled.speedup


def refusal(settings: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(EagleError) as error:
        bench(settings, **changes)
    assert "\n" not in str(error.value)
    assert not Path(settings["output"]).exists()
    return str(error.value)


def test_a_head_of_another_target_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    other = make_tiny_target(tmp_path / "other", seed=1, vocab=300, hidden=32, max_length=160)
    assert "differs in weights" in refusal(settings, target=str(other))


def test_a_set_that_does_not_fit_the_context_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "long.jsonl", [PROMPTS[2]])
    message = refusal(settings, prompts=[*settings["prompts"], str(source)])
    assert message.startswith(f"none of the 1 prompts of {source} fits")


def test_something_else_than_a_head_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    bench(settings, num_prompts=1)
    message = refusal(settings | {"output": str(tmp_path / "again")}, head=settings["output"])
    assert "is a report artifact where head is needed" in message
