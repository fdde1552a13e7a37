"""Claims about servers that bench starts itself: what is run, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import open_artifact
from stages.bench import stage
from stages.bench.config import BenchConfig
from stages.bench.launch import Launched, LaunchLine, launched
from stages.bench.launch.command import Command, Model, command_of
from stages.bench.launch.start import _free_port
from stages.bench.memory import group_members, own_peak
from stages.bench.report import BenchReport
from stages.bench.workload import Job
from stages.decoding import SamplingParams
from stages.errors import EagleError
from stages.progress import Reporter
from stages.targets.tokenizer import load_tokenizer
from tests.bench.test_stage import TREE
from tests.serve.running_server import soon
from tests.tiny import write_jsonl

QUIET = Reporter(quiet=True)
LLAMA_SERVER = Path(__file__).with_name("llama_server.py")
JOB = Job("set", "p", 0, ({"role": "user", "content": "hello"},))
MODEL = Model("target", 100, 4, "cpu", "bfloat16", None, "full")

# Answers as a server does, in a child of its own that does not end when asked to.
SERVER = """
import json, os, signal, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(b"{}" if self.path == "/health" else b'{"data": [{"id": "m"}]}')
    def do_POST(self):
        if "ends" in sys.argv:
            os._exit(7)
        self.rfile.read(int(self.headers["Content-Length"]))
        usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 1}}
        chunk = {"choices": [{"delta": {"content": "a"}}]}
        self.reply(b"".join(b"data: %s\\n\\n" % json.dumps(e).encode() for e in (chunk, usage)))
    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print("starting", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(launched, "_SECONDS_TO_STOP", 0.5)
    servers = []

    def start(*options: str) -> Launched:
        port = _free_port()
        command = Command([sys.executable, "-c", SERVER, str(port), *options])
        servers.append(Launched("small", command, port, tmp_path / "log"))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def states(group: int) -> set[str]:
    """Of the processes of a group: T is stopped."""
    members = [Path(f"/proc/{pid}/stat").read_text() for pid in group_members(group)]
    return {stat.rpartition(")")[2].split()[0] for stat in members}


def test_a_server_sleeps_between_its_turns_and_is_gone_with_its_children_after(started: Any) -> None:
    server = started()
    server.wait(60)
    group = server._process.pid
    assert len(group_members(group)) == 2
    for _ in range(2):
        with server.turn():
            assert soon(lambda: "T" not in states(group))
            turn = server.answer([(0, JOB)], 1, SamplingParams())
            assert turn.samples[0].text == "a"
            assert turn.peak_memory > 2**20
        assert soon(lambda: states(group) == {"T"})
    server.close()
    assert soon(lambda: group_members(group) == [])  # the killed are there until they are reaped


def test_a_server_that_ends_while_it_is_measured_is_named_with_its_log(started: Any) -> None:
    server = started("ends")
    server.wait(60)
    told = "small ended while it was measured, with exit code 7; its log .* ends"
    with server.turn(), pytest.raises(EagleError, match=told):
        server.answer([(0, JOB)], 1, SamplingParams())


def test_a_server_that_never_is_healthy_is_not_waited_for_longer_than_said(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]
    server = Launched("slow", Command(words), _free_port(), tmp_path / "log")
    try:
        assert soon(lambda: (tmp_path / "log").read_text() == "loading\n", 30.0)
        with pytest.raises(EagleError, match=r"slow is not ready after 0.2 s .*wait=.* ends: loading"):
            server.wait(0.2)
    finally:
        server.close()
    assert soon(lambda: group_members(server._process.pid) == [])


@pytest.mark.parametrize("told", [b"", b"\n"])
def test_a_server_is_killed_when_bench_ends_without_having_stopped_it(told: bytes) -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as server:
        os.killpg(server.pid, signal.SIGSTOP)
        launched.warden(server.pid).communicate(told)  # the pipe ends, as it does with this process
        ended = soon(lambda: server.poll() is not None, 10.0 if told == b"" else 0.2)
        server.kill()
    assert ended == (told == b"")


def server_processes(mark: str, word: str = "serve") -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if mark in words and word in words:
                found.append(int(folder.name))
    return found


def test_our_own_server_is_started_measured_and_stopped(
    target_folder: Path, head_uri: str, tmp_path: Path
) -> None:
    prompts = [{"id": "one", "prompt": "write a line"}, {"id": "two", "prompt": "and another"}]
    config = BenchConfig(
        target=str(target_folder),
        launch=[f"ours=eagle:head={head_uri},args=--tree '{TREE}'"],
        prompts=[str(write_jsonl(tmp_path / "chat.jsonl", prompts))],
        output=str(tmp_path / "report"),
        max_new_tokens=8,
        concurrency="2",
        device="cpu",
        dtype="float32",
    )
    stage.run(config, QUIET)
    report = BenchReport.model_validate_json(open_artifact(config.output, "report").read("report.json"))
    (level,) = report.sweep.levels
    assert (level.contestant, level.endpoint, level.completed) == ("ours", True, 2)
    assert level.accepted_per_step > 0
    assert level.peak_memory > 100 * 2**20
    assert report.pooled is None
    assert server_processes(str(target_folder)) == []


@pytest.mark.slow
def test_llama_cpp_is_started_measured_and_stopped(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    program = tmp_path / "llama-server"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {LLAMA_SERVER} "$@"\n')
    program.chmod(0o755)
    prompts = [{"prompt": "Name three colours."}, {"prompt": "What is two and two?"}]
    config = BenchConfig(
        target="builtin:smollm2",
        launch=[f"llama=llama-server:bin={program}"],
        prompts=[str(write_jsonl(tmp_path / "chat.jsonl", prompts))],
        output=str(tmp_path / "report"),
        max_new_tokens=8,
        concurrency="2",
    )
    stage.run(config, QUIET)
    report = BenchReport.model_validate_json(open_artifact(config.output, "report").read("report.json"))
    (level,) = report.sweep.levels
    assert (level.contestant, level.completed, level.total_output_tokens) == ("llama", 2, 16)
    tokenizer = load_tokenizer("builtin:smollm2")
    longest = max(len(tokenizer.encode(each["prompt"])) for each in prompts)
    assert level.prompt_lengths.longest > longest  # with its template, and not from a cache
    assert server_processes(str(LLAMA_SERVER), "--model") == []


def test_a_server_that_does_not_start_is_told_in_one_line_with_what_it_said(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where its log stays
    config = BenchConfig(
        target=str(target_folder),
        launch=["ours=eagle:args=--max-batch 0"],
        prompts=[str(write_jsonl(tmp_path / "chat.jsonl", [{"prompt": "hello"}]))],
        output=str(tmp_path / "report"),
    )
    with pytest.raises(EagleError, match=r"server ours ended with exit code 2; its log .*/ours\.log ends: "):
        stage.run(config, QUIET)
    assert server_processes(str(target_folder)) == []


def test_options_of_a_server_are_read_with_its_flags_last() -> None:
    text = "v=vllm:head,chain=2,python=/x/python,args=--a 1,2 --b 'c d'"
    assert LaunchLine.parse(text, ["first", "second"]) == LaunchLine(
        "v", "vllm", "first", 2, "/x/python", flags=("--a", "1,2", "--b", "c d")
    )
    assert LaunchLine.parse("l=llama-server", []) == LaunchLine("l", "llama-server")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vllm", "give NAME=KIND"),
        ("v=tgi", "where KIND is eagle, vllm, sglang, llama-server"),
        ("v=vllm:head", "there is no --head that it could take"),
        ("v=vllm:chain=2", "chain is a number from 1 on, and goes with head"),
        ("v=vllm:head=h,chain=0", "chain is a number from 1 on"),
        ("v=vllm:wait=soon", "wait is a number of seconds"),
        ("l=llama-server:head=h", "llama-server takes bin, wait, args, and not 'head'"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(EagleError, match=message) as raised:
        LaunchLine.parse(text, [])
    assert "\n" not in str(raised.value)


def test_vllm_gets_the_folder_of_the_head_and_no_prefix_cache(target_folder: Path, head_uri: str) -> None:
    line = LaunchLine.parse(f"v=vllm:head={head_uri},chain=2,python=/x/python,args=--enforce-eager", [])
    model = Model(str(target_folder), 100, 4, "cpu", "bfloat16", None, "full")
    words = command_of(line, model, 123).words
    assert words[:3] == ["/x/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert words[-1] == "--enforce-eager"
    assert "--no-enable-prefix-caching" in words
    said = {a: b for a, b in pairwise(words) if a.startswith("--")}
    assert (said["--model"], said["--port"], said["--max-num-seqs"]) == (str(target_folder), "123", "4")
    assert json.loads(said["--speculative-config"]) == {
        "method": "eagle3",
        "model": str(Path(head_uri)),
        "num_speculative_tokens": 2,
    }


def test_llama_server_shares_its_context_out_and_reads_gguf_only(target_folder: Path, tmp_path: Path) -> None:
    line = LaunchLine.parse("l=llama-server:bin=/x/llama-server", [])
    file = tmp_path / "m.gguf"
    file.touch()
    words = command_of(line, Model(str(file), 100, 4, "cpu", "bfloat16", None, "full"), 123).words
    assert words[0] == "/x/llama-server"
    said = dict(pairwise(words))
    assert (said["--model"], said["--ctx-size"], said["--parallel"]) == (str(file), "400", "4")
    assert "--no-cache-prompt" in words
    builtin = command_of(line, Model("builtin:smollm2", 100, 4, "cpu", "bfloat16", None, "full"), 123).words
    assert Path(builtin[2]).name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    with pytest.raises(EagleError, match="llama-server reads GGUF files, and the target is "):
        command_of(line, Model(str(target_folder), 100, 4, "cpu", "bfloat16", None, "full"), 123)


def test_sglang_gets_a_chain_and_no_prefix_cache(target_folder: Path, head_uri: str) -> None:
    line = LaunchLine.parse(f"s=sglang:head={head_uri},chain=2,python=/x/python", [])
    words = command_of(line, Model(str(target_folder), 100, 4, "cpu", "bfloat16", None, "full"), 123).words
    assert words[:3] == ["/x/python", "-m", "sglang.launch_server"]
    assert "--disable-radix-cache" in words
    said = dict(pairwise(words))
    assert (said["--model-path"], said["--context-length"]) == (str(target_folder), "100")
    assert said["--speculative-draft-model-path"] == str(Path(head_uri))
    drafts = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
    assert [said[each] for each in drafts] == ["2", "1", "3"]


def test_keys_do_not_reach_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_API_KEY", "secret")
    monkeypatch.setenv("EAGLE_SERVE_PORT", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    environment = Command([], {"VLLM_CPU_KVCACHE_SPACE": "4", "OTHER": "x"}).environment()
    assert not {"EAGLE_API_KEY", "EAGLE_SERVE_PORT"} & set(environment)
    assert (environment["VLLM_CPU_KVCACHE_SPACE"], environment["OTHER"]) == ("9", "x")


def test_the_peak_of_this_process_is_no_less_than_what_it_holds() -> None:
    held = bytearray(os.urandom(2**20)) * 64
    peak = own_peak()
    assert peak is not None
    assert peak > len(held)
