"""Stores that cannot be reached or have no key for us: said in one line within ten seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults.eagle_process import EagleProcess, Ended
from tests.faults.proxy import answers, silent_port
from tests.faults.runs import Place

SAID_WITHIN_S = 10
SLOW_MACHINE_S = 5


def test_what_does_not_answer_is_given_up_within_ten_seconds_by_every_stage(
    gcs: Place, tmp_path: Path
) -> None:
    def start(stage: str, root: str, **env: str) -> EagleProcess:
        arguments = gcs.runs.arguments(stage, root, conversations=f"{root}/in", features=f"{root}/in")
        return gcs.runs.eagle.start(*arguments, env=gcs.env | env)

    with silent_port() as port, socket.socket() as refuses:
        refuses.bind(("127.0.0.1", 0))  # and does not listen
        no_credentials = {
            "HOME": str(tmp_path),
            "STORAGE_EMULATOR_HOST": "",
            "GCE_METADATA_HOST": f"127.0.0.1:{port}",
            "GCE_METADATA_IP": f"127.0.0.1:{port}",
        }
        silent = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
        refusing = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{refuses.getsockname()[1]}"}
        runs = [
            (start("gen-data", "gs://nosuch/run"), "bucket nosuch of gs://nosuch/run does not exist"),
            (start("gen-data", gcs.root, **silent), "does not answer"),
            (start("extract-features", gcs.root, **silent), "does not answer"),
            (start("train", gcs.root, **silent), "does not answer"),
            (start("train", gcs.root, **refusing), gcs.root),
            (start("gen-data", gcs.root, **no_credentials), "gcloud auth"),
        ]
        ended = [run.wait() for run, _ in runs]
    for one, (_, says) in zip(ended, runs, strict=True):
        assert says in one.error
        assert one.seconds - ended[0].seconds < SAID_WITHIN_S + SLOW_MACHINE_S  # the first says it at once


def test_a_bucket_that_is_closed_to_us_says_how_to_log_in(gcs: Place) -> None:
    gcs.proxy.fault(answers(403, "caller has no access"), times=None)
    ended = gcs.start("gen-data").wait()
    assert f"no access to {gcs.output}" in ended.error
    assert "gcloud auth" in ended.error


@pytest.mark.slow
def test_a_machine_without_network_and_credentials_says_so(gcs: Place, tmp_path: Path) -> None:
    """In a network namespace without any interface; a process of its own from the first line on."""
    alone = ["unshare", "--net", "--map-root-user"]
    with suppress(OSError):
        if subprocess.run([*alone, "true"], capture_output=True).returncode:
            pytest.skip("no network namespaces here")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("GOOGLE_", "STORAGE_"))}
    command = [*alone, sys.executable, "-m", "eagle_cli", *gcs.runs.arguments("gen-data", gcs.output)]
    done = subprocess.run(
        command, env=env | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=90
    )
    ended = Ended(done.returncode, done.stdout, done.stderr, 0.0)
    assert gcs.output in ended.error
    assert "gcloud auth" in ended.error or "network" in ended.error
