"""`eagle serve` as a process: start, signals, wrong addresses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from stages.errors import EagleError
from stages.progress import Reporter
from stages.serve.config import ServeConfig
from stages.serve.server import bind, url
from stages.serve.stage import is_loopback, run
from tests.serve.running_server import soon
from tests.tiny import make_tiny_target

KEY = "sk-of-the-environment"
LONG = 480
"""Tokens that the tiny target has room for; on a busy machine the answer may still end before it is seen."""

PATIENT = ("--shutdown-timeout", "600")  # the machine may be busy, or stand still for a while


class ServeProcess:
    """`eagle serve` of the tiny target on a free port, ready for requests."""

    def __init__(self, target: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "eagle_cli", "serve", "--target", str(target), "--port", "0", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "EAGLE_API_KEY": KEY}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.log: list[str] = []
        assert self.process.stderr is not None
        self.url = ""
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if found := re.search(r"serving (\S+) at (http://\S+)/v1", line):
                self.name, self.url = found.groups()
                break
        assert self.url, self.log
        self._drain = threading.Thread(target=lambda: self.log.extend(self.process.stderr or []))
        self._drain.start()

    def stop(self, *signals: signal.Signals) -> int:
        """Sends signals and waits for the end; returns the exit code."""
        for sig in signals:
            self.process.send_signal(sig)
        code = self.process.wait(240)
        self._drain.join(5)
        return code

    def stdout(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read()


@contextmanager
def serve_process(target: Path, *flags: str) -> Iterator[ServeProcess]:
    serving = ServeProcess(target, *flags)
    try:
        yield serving
    finally:
        serving.process.kill()
        serving.process.wait(10)


def health(base_url: str) -> httpx.Response:
    return httpx.get(f"{base_url}/health", timeout=240)


def ask(base_url: str, max_tokens: int) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{base_url}/v1/chat/completions", json=body, headers=headers, timeout=240)


def test_sigint_lets_the_running_answer_finish_and_exits_with_0(tiny_folder: Path, head_folder: str) -> None:
    flags = ["--served-model-name", "mine", "--head", head_folder, "--tree", "chain:depth=2", *PATIENT]
    with ThreadPoolExecutor(1) as clients, serve_process(tiny_folder, "--json", *flags) as serving:
        answer = clients.submit(ask, serving.url, LONG)
        assert soon(lambda: answer.done() or health(serving.url).json()["running"] == 1)
        assert serving.stop(signal.SIGINT) == 0
        assert '"finish_reason":"length"' in answer.result().text
        assert answer.result().text.endswith("data: [DONE]\n\n")
        result = json.loads(serving.stdout())
        assert (result["model"], result["requests"], result["url"]) == ("mine", 1, serving.url)
        assert any("tok/s" in line and "accepted/step" in line for line in serving.log)
        assert "Traceback" not in "\n".join(serving.log)


def test_sigterm_waits_as_long_as_it_is_told_and_says_so_and_a_second_signal_does_not(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", max_length=20_000)
    flags = ["--host", "0.0.0.0", "--max-model-len", "15000", "--log-format", "json"]
    with ThreadPoolExecutor(1) as clients, serve_process(target, *flags, *PATIENT) as serving:
        answer = clients.submit(ask, serving.url, 14_900)
        assert soon(lambda: health(serving.url).json()["running"] == 1)
        assert serving.name == str(target)
        assert httpx.get(f"{serving.url}/v1/models").status_code == 401
        card = httpx.get(f"{serving.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}).json()
        assert card["data"][0]["max_model_len"] == 15_000
        serving.process.send_signal(signal.SIGTERM)
        assert soon(lambda: any("the running answer has 600 s to finish" in line for line in serving.log))
        told = health(serving.url)
        assert (told.status_code, told.json()["status"], told.json()["running"]) == (503, "stopping", 1)
        refused = ask(serving.url, 1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
        assert serving.stop(signal.SIGINT) == 0
        assert "server_stopping" in answer.result().text
        assert any('"outcome": "server_stopping"' in line for line in serving.log)
        assert "Traceback" not in "\n".join(serving.log)


@contextmanager
def hangups(action: signal.Handlers) -> Iterator[None]:
    """What a process that is begun meanwhile does at a SIGHUP, if it does not say so itself."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_closed_ends_it_as_sigterm_does_unless_that_is_ignored(tiny_folder: Path) -> None:
    with hangups(signal.SIG_IGN), serve_process(tiny_folder) as serving:  # as nohup does
        serving.process.send_signal(signal.SIGHUP)
        assert '"finish_reason":"length"' in ask(serving.url, 20).text
        assert serving.stop(signal.SIGINT) == 0
    with (
        hangups(signal.SIG_DFL),
        ThreadPoolExecutor(1) as clients,
        serve_process(tiny_folder, *PATIENT) as serving,
    ):
        answer = clients.submit(ask, serving.url, LONG)
        assert soon(lambda: answer.done() or health(serving.url).json()["running"] == 1)
        assert serving.stop(signal.SIGHUP) == 0
        assert '"finish_reason":"length"' in answer.result().text


def outcome(base_url: str, number: int) -> str:
    """What becomes of a request: "complete", "stopping" (an error says so), or "refused" at the door."""
    body = {
        "messages": [{"role": "user", "content": f"hello {number}"}],
        "max_tokens": 60 + 90 * (number % 4),
        "ignore_eos": True,
        "stream": number % 2 == 0,
    }
    try:
        response = httpx.post(
            f"{base_url}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=240,
        )
    except httpx.ConnectError:
        return "refused"
    if '"server_stopping"' in response.text:
        assert response.status_code == (200 if number % 2 == 0 and response.text.startswith("data:") else 503)
        return "stopping"
    assert response.status_code == 200, response.text
    assert '"finish_reason":"length"' in response.text
    return "complete"


def test_sigterm_under_load_leaves_no_request_without_an_answer_or_a_clear_error(tiny_folder: Path) -> None:
    """Of those that run, that wait, and that come while it stops."""
    flags = ["--max-batch", "2", "--max-queue", "32", "--dtype", "float32", *PATIENT]
    with ThreadPoolExecutor(16) as clients, serve_process(tiny_folder, *flags) as serving:
        jobs = [clients.submit(outcome, serving.url, number) for number in range(12)]
        assert soon(lambda: health(serving.url).json()["running"] == 2, 30)
        serving.process.send_signal(signal.SIGTERM)
        jobs += [clients.submit(outcome, serving.url, number) for number in range(4)]
        assert serving.stop() == 0
        outcomes = [job.result() for job in jobs]
    assert outcomes.count("complete") >= 1, "those that run may finish"
    assert outcomes[:12].count("stopping") >= 1, "those that wait are told"
    assert "refused" not in outcomes[:12]
    assert "Traceback" not in "\n".join(serving.log)


def refusal(config: ServeConfig) -> str:
    with pytest.raises(EagleError) as caught:
        run(config, Reporter(quiet=True))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_port_in_use_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refusal(ServeConfig(target=str(tmp_path / "not looked at"), port=port))
    assert f"127.0.0.1 port {port} (address already in use)" in message


def test_a_host_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    message = refusal(ServeConfig(target=str(tmp_path), host="no such host", port=0))
    assert "--host no such host cannot be resolved" in message


def test_a_target_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", chat_template=None)
    message = refusal(ServeConfig(target=str(target), port=0, device="cpu", dtype="float32"))
    assert "has no chat template" in message


@pytest.mark.parametrize(
    ("host", "start"),
    [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:")],
)
def test_the_url_is_one_that_a_client_on_this_machine_can_use(host: str, start: str) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with bind(host, 0) as listener:
        assert url(listener).startswith(start)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("10.1.2.3", False), ("fe80::1%eth0", False)],
)
def test_only_addresses_of_this_machine_alone_need_no_key(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback
