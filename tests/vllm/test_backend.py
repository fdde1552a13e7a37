"""`eagle serve --backend vllm`: a real vLLM with this head, the same text as ours, stopped by a signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from stages.decoding import EagleModel
from stages.targets import Target
from tests.vllm.conftest import CONTEXT, TARGET, Teacher
from tests.vllm.installed import needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEY = "sk-of-the-environment"
SECONDS_TO_START = 300


@needs_vllm
def test_the_process_becomes_a_vllm_that_speculates_with_the_head(
    target: Target, teacher: Teacher, tmp_path: Path
) -> None:
    head = teacher.head("eagle3")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--target", TARGET, "--head", head, "--dtype", "float32", "--max-model-len", str(CONTEXT)]
    flags += [
        "--max-batch",
        "2",
        "--port",
        str(port),
        "--tree",
        "chain:depth=2",
        "--backend-args",
        "--enforce-eager",
    ]
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "eagle_cli", "serve", "--backend", "vllm", *flags],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "EAGLE_API_KEY": KEY, "VLLM_CPU_KVCACHE_SPACE": "1"},
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        client = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)
        end = time.monotonic() + SECONDS_TO_START
        while not answers(client):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < end, log.read_text()[-2000:]
            time.sleep(0.5)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        messages = [{"role": "user", "content": "Name three colours."}]
        body = {"model": TARGET, "messages": messages, "temperature": 0, "max_tokens": 24}
        answer = client.post("/v1/chat/completions", json=body).json()
        own = EagleModel(target).generate(messages, max_new_tokens=24)
        assert answer["choices"][0]["message"]["content"] == own.text
        drafted = [
            line for line in client.get("/metrics").text.splitlines() if "num_draft_tokens_total{" in line
        ]
        assert float(drafted[0].rsplit(" ", 1)[1]) > 0
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # a group of its own
            process.wait()
    assert KEY not in log.read_text()


def answers(client: httpx.Client) -> bool:
    """Whether the server is there."""
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
