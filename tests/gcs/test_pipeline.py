"""The stages chained as a user chains them, on disk and on Google Cloud Storage, to the same artifacts."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from stages.artifacts import Artifact, Kind, open_artifact
from tests.faults.eagle_process import EagleProcess, EagleProcesses
from tests.gcs.server import GcsServer
from tests.tiny import write_jsonl

TOPICS = ("rivers", "bridges", "lamps", "clouds", "violins", "maps", "kites", "bread")
KINDS: tuple[Kind, ...] = ("conversations", "features", "head", "report")
SMALL = ("--device", "cpu", "--dtype", "float32", "--quiet")


@dataclass(frozen=True)
class Run:
    """What the stages made below one address."""

    eagle: EagleProcesses
    uri: str
    target: str
    env: dict[str, str]
    results: dict[str, Any]

    def open(self, kind: Kind) -> Artifact:
        return open_artifact(f"{self.uri}/{kind}", kind)

    def stage(self, name: str, *arguments: str) -> None:
        ended = self.eagle.run(name, *arguments, *SMALL, "--json", env=self.env, seconds=120)
        self.results[name] = ended.result

    def all_stages(self, prompts: str, eval_prompts: str) -> Run:
        uri, target = self.uri, ("--target", self.target)
        self.stage(
            "gen-data", *target, "--prompts", prompts, "--max-new-tokens", "24",
            "--shard-rows", "3", "--near-duplicates", "1", "--temperature", "0.7",
            "--output", f"{uri}/conversations",
        )  # fmt: skip
        self.stage(
            "extract-features", *target, "--conversations", f"{uri}/conversations",
            "--shard-bytes", "100000", "--forward-tokens", "150", "--output", f"{uri}/features",
        )  # fmt: skip
        self.stage(
            "train", "--features", f"{uri}/features", "--output", f"{uri}/head", "--epochs", "20",
            "--batch-tokens", "64", "--holdout", "0", "--draft-vocab-size", "512",
        )  # fmt: skip
        self.stage(
            "bench", *target, "--head", f"{uri}/head", "--prompts", eval_prompts, "--max-new-tokens", "24",
            "--num-prompts", "4", "--tree", "dynamic:min_prob=0,expand_prob=0", "--output", f"{uri}/report",
        )  # fmt: skip
        return self

    @contextmanager
    def served(self) -> Iterator[str]:
        """The address of `eagle serve` with the head of this run."""
        arguments = ("--target", self.target, "--head", f"{self.uri}/head", "--port", "0")
        process = self.eagle.start("serve", *arguments, "--device", "cpu", "--dtype", "float32", env=self.env)
        try:
            yield _address(process)
        finally:
            process.signal(signal.SIGTERM)
            ended = process.wait(20)
        assert ended.code == 0, ended.err


def _address(process: EagleProcess) -> str:
    while process.running():
        if found := re.search(r"serving \S+ at (http://\S+)/v1", process.err()):
            return found[1]
        time.sleep(0.02)
    raise AssertionError(process.wait().err)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"turns": [f"Tell me about {topic} and mail me at jo@example.com", "Go on."]} for topic in TOPICS]
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


@pytest.fixture(scope="module")
def local(
    eagle: EagleProcesses, tiny_path: str, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    folder = tmp_path_factory.mktemp("local")
    run = Run(eagle, f"{folder}/run", tiny_path, {"EAGLE_CACHE": f"{folder}/cache"}, {})
    return run.all_stages(str(prompts), str(prompts))


@pytest.fixture(scope="module")
def bucket(
    eagle: EagleProcesses,
    gcs_server: GcsServer,
    tiny_path: str,
    prompts: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Run]:
    """The run with every artifact and bench's prompts on gs://. All it is told is where the emulator is."""
    env = {
        "STORAGE_EMULATOR_HOST": gcs_server.url,
        "EAGLE_CACHE": str(tmp_path_factory.mktemp("cache")),
    }
    run = Run(eagle, "gs://bucket/pipeline", tiny_path, env, {})
    gcs_server.write("bucket", "pipeline/prompts.jsonl", prompts.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        yield run.all_stages(str(prompts), "gs://bucket/pipeline/prompts.jsonl")


def _data(manifest: Any) -> dict[str, Any]:
    """What of a manifest has to be the same wherever the run was: all but times and addresses."""
    kept = manifest.model_dump(mode="json", exclude={"created"})
    for parent in kept["parents"]:
        del parent["uri"], parent["digest"]
    return kept


@pytest.mark.parametrize("kind", ["conversations", "features"])
def test_a_bucket_holds_byte_for_byte_what_a_disk_would(local: Run, bucket: Run, kind: Kind) -> None:
    on_disk, in_bucket = local.open(kind), bucket.open(kind)
    assert _data(in_bucket.manifest) == _data(on_disk.manifest)
    assert len(in_bucket.manifest.shards) > 2
    for entry in (*in_bucket.manifest.shards, *in_bucket.manifest.files):
        assert in_bucket.read(entry.path) == on_disk.read(entry.path)


def test_a_head_trained_from_a_bucket_is_the_head_trained_from_a_disk(local: Run, bucket: Run) -> None:
    for name in ("model.safetensors", "config.json"):
        assert bucket.open("head").read(name) == local.open("head").read(name)


def test_a_bucket_holds_nothing_but_the_four_artifacts(bucket: Run, gcs_server: GcsServer) -> None:
    listed = {
        f"{kind}/{entry.path}"
        for kind in KINDS
        for entry in (*bucket.open(kind).manifest.shards, *bucket.open(kind).manifest.files)
    }
    held = set(gcs_server.objects("bucket", "pipeline/"))
    assert held == listed | {f"{kind}/manifest.json" for kind in KINDS} | {"prompts.jsonl"}


@pytest.mark.parametrize("place", ["local", "bucket"])
def test_every_stage_reads_what_the_one_before_it_wrote(place: str, request: pytest.FixtureRequest) -> None:
    run: Run = request.getfixturevalue(place)
    assert run.results["gen-data"]["rows"] > len(TOPICS) - 3  # a random target may have nothing to say
    assert run.results["gen-data"]["pii"] == {"EMAIL_ADDRESS": len(TOPICS)}
    made = [run.open(kind) for kind in KINDS]
    for parent, child in pairwise(made):
        assert [p.digest for p in child.manifest.parents] == [parent.manifest.digest]
        assert child.manifest.target == made[0].manifest.target
    measured = json.loads(made[-1].read("report.json"))
    assert measured["lossless"]["faults"] == 0
    assert measured["lossless"]["near_ties"] == 0  # float32
    assert measured["pooled"]["accepted_per_step"] > 0.05  # chance would be about 0.02


def test_a_head_in_a_bucket_is_served(local: Run, bucket: Run) -> None:
    answers = []
    for run in (local, bucket):
        with run.served() as url:
            messages = [{"role": "user", "content": f"More of {TOPICS[0]}"}]
            body = {"messages": messages, "max_tokens": 20, "temperature": 0}
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            usage = {name: count for name, count in reply["usage"].items() if name != "speculation"}
            answers.append((reply["choices"], usage))  # what is drafted follows from what it costs now
    assert answers[0] == answers[1]
    assert answers[0][1]["completion_tokens"] > 0
