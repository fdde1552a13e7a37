"""The commands that the tests disturb, and what they come to when nobody does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.eagle_process import EagleProcess, EagleProcesses
from tests.faults.proxy import Match, Proxy, to
from tests.gcs.server import GcsServer

STAGES = ("gen-data", "extract-features")
_SETTINGS = ("--device", "cpu", "--dtype", "float32", "--quiet")


def contents(server: GcsServer, uri: str) -> dict[str, bytes]:
    """Every file below a local path or a gs:// URI, by relative path."""
    if uri.startswith("gs://"):
        bucket, _, prefix = uri.removeprefix("gs://").partition("/")
        return server.objects(bucket, f"{prefix}/")
    root = Path(uri)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def comparable(found: dict[str, bytes]) -> dict[str, Any]:
    """An artifact's files, the manifest without the time of writing and the address of its inputs."""
    manifest = json.loads(found.get("manifest.json", b"{}"))
    manifest.pop("created", None)
    for parent in manifest.get("parents", ()):
        del parent["uri"]
    return {**found, "manifest.json": manifest}


def wait_until(condition: Callable[[], object], run: EagleProcess) -> None:
    """Waits until something is so, which it has to become while `run` runs."""
    while not condition():
        assert run.running(), f"it ended before: {run.wait()}"
        time.sleep(0.002)


@dataclass(frozen=True)
class Runs:
    """Starts each stage with the same small inputs.

    Attributes:
        whole: what each stage makes of them when nothing disturbs it, `comparable`.
    """

    eagle: EagleProcesses
    target: str
    prompts: str
    conversations: str
    features: str
    whole: dict[str, dict[str, Any]] = field(default_factory=dict)

    def arguments(self, stage: str, output: str, **inputs: str) -> list[str]:
        conversations = inputs.get("conversations", self.conversations)
        features = inputs.get("features", self.features)
        own = {
            "gen-data": [
                "--target", self.target, "--prompts", self.prompts, "--pii", "off", "--near-duplicates", "1",
                "--max-new-tokens", "12", "--shard-rows", "2",
            ],
            "extract-features": [
                "--target", self.target, "--conversations", conversations,
                "--forward-tokens", "150", "--shard-bytes", "100000",
            ],
            "train": ["--features", features, "--epochs", "1", "--batch-tokens", "64", "--holdout", "0"],
        }  # fmt: skip
        return [stage, *own[stage], "--output", output, *_SETTINGS]


@dataclass(frozen=True)
class Place:
    """Where a test's artifacts are, a local folder or a bucket behind the proxy; nothing exists there yet."""

    root: str
    runs: Runs
    server: GcsServer
    proxy: Proxy
    env: dict[str, str]

    @property
    def output(self) -> str:
        return f"{self.root}/output"

    def start(self, stage: str, *flags: str, host: str = "", **inputs: str) -> EagleProcess:
        arguments = [*self.runs.arguments(stage, self.output, **inputs), *flags]
        return self.runs.eagle.start(*arguments, env=self.env, host=host)

    def copy(self, artifact: str) -> str:
        """A copy of a local artifact in the bucket, put there past the proxy; its address."""
        uri = f"{self.root}/{Path(artifact).name}"
        for name, data in contents(self.server, artifact).items():
            self.write(f"{uri}/{name}", data)
        return uri

    def write(self, uri: str, data: bytes) -> None:
        self.server.write("bucket", uri.removeprefix("gs://bucket/"), data)

    def read(self, uri: str) -> bytes:
        return self.server.read("bucket", uri.removeprefix("gs://bucket/"))

    def contents(self) -> dict[str, bytes]:
        return contents(self.server, self.output)

    def seen(self, match: Match) -> bool:
        """Whether the store has been sent such a request."""
        return any(match(request) for request in list(self.proxy.requests))

    def begun(self) -> bool:
        """Whether anything has been written to the output, or asked to be."""
        if not self.root.startswith("gs://"):
            return Path(self.output).exists()
        prefix = self.output.removeprefix("gs://bucket/")
        return self.seen(to("upload", prefix))

    def is_whole(self, stage: str) -> None:
        """Fails unless the output holds exactly what the stage makes undisturbed."""
        found, whole = comparable(self.contents()), self.runs.whole[stage]
        assert sorted(found) == sorted(whole)
        assert [name for name in whole if found[name] != whole[name]] == []
