"""Claims about measuring servers: our own, and small ones that misbehave."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import artifact_state, open_artifact
from stages.bench import stage
from stages.bench.config import BenchConfig
from stages.bench.endpoint import Endpoint
from stages.bench.report import BenchReport
from stages.bench.workload import Job
from stages.decoding import EagleModel, SamplingParams
from stages.errors import EagleError
from stages.progress import Reporter
from stages.targets import Target
from tests.bench.test_stage import TREE
from tests.serve.running_server import running_server
from tests.tiny import write_jsonl

PROMPTS = [
    {"id": "one", "prompt": "write a line"},
    {"id": "two", "turns": ["first do this", "then do that"]},
    {"id": "three", "prompt": "and another"},
]
JOB = Job("set", "p", 0, ({"role": "user", "content": "hello"},))


def report_of(output: str) -> BenchReport:
    return BenchReport.model_validate_json(open_artifact(output, "report").read("report.json"))


def test_our_own_server_gives_the_same_texts_with_tokens_from_its_usage(
    target: Target, target_folder: Path, head_uri: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "prompts": [str(write_jsonl(tmp_path / "chat.jsonl", PROMPTS))],
        "max_new_tokens": 8,
        "concurrency": "2",
        "tree": TREE,
        "device": "cpu",
        "dtype": "float32",
    }
    with running_server(EagleModel.from_pretrained(target, head_uri, tree=TREE, max_batch=2)) as server:
        both = settings | {"target": str(target_folder), "head": head_uri, "output": str(tmp_path / "both")}
        stage.run(BenchConfig(**both, endpoint=[f"ours={server.url}"]), Reporter(quiet=True))
        alone = settings | {"output": str(tmp_path / "alone")}
        stage.run(BenchConfig(**alone, endpoint=[f"ours={server.url}/v1"]), Reporter(quiet=True))
    plain, _, ours = report_of(both["output"]).sweep.levels
    assert (ours.contestant, ours.endpoint, ours.completed) == ("ours", True, 4)
    assert (ours.compared, ours.identical) == (4, 4)
    assert ours.total_input_tokens == plain.total_input_tokens
    assert ours.total_output_tokens == plain.total_output_tokens
    assert ours.accepted_per_step == pytest.approx(sum(ours.accepted_per_depth))
    assert ours.accepted_per_step > 0
    assert 0 < ours.median_ttft_ms <= ours.median_e2el_ms
    report = report_of(alone["output"])
    assert (report.pooled, report.lossless, report.sweep.baseline) == (None, None, "ours")
    assert report.sweep.levels[0].completed == 3  # a later turn has no history without a target
    assert b"tokens per second" in open_artifact(alone["output"], "report").read("report.html")


@contextmanager
def small_server(events: list[Any], status: int = 200, refuses: str = "") -> Iterator[str]:
    """Streams the same events to every chat, unless it has a field that is refused."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, json.dumps({"data": [{"id": "m"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if refuses in body:
                self._reply(400, f"unknown field {refuses}".encode())
                return
            lines = [
                f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events
            ]
            self._reply(status, "".join(lines).encode())

        def _reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": None}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 7}}


def test_tokens_come_from_usage_and_never_from_chunks() -> None:
    with small_server([chunk(""), chunk("many words in one chunk"), chunk(" more"), USAGE, "[DONE]"]) as url:
        turn = Endpoint("e", url).answer([(0, JOB), (1, JOB), (2, JOB)], 2, SamplingParams(max_new_tokens=7))
    for sample in turn.samples:
        assert (sample.prompt_tokens, sample.output_tokens) == (4, 7)
        assert sample.text == "many words in one chunk more"
        assert len(sample.itl_s) == 1
    assert [sample.request for sample in turn.samples] == [0, 1, 2]


def test_a_server_that_takes_openais_own_fields_only_is_asked_with_those() -> None:
    with small_server([chunk("a"), USAGE], refuses="top_k") as url:
        endpoint = Endpoint("e", url)
        endpoint.warm_up(JOB, 2, SamplingParams())
        assert endpoint.answer([(0, JOB)], 1, SamplingParams()).samples[0].output_tokens == 7
    with small_server([USAGE], refuses="messages") as url:
        endpoint = Endpoint("e", url)
        with pytest.raises(EagleError, match=r"answered 400 at .*: unknown field messages"):
            endpoint.warm_up(JOB, 1, SamplingParams())


@pytest.mark.parametrize(
    ("events", "status", "message"),
    [
        ([chunk("a"), "[DONE]"], 200, "endpoint e does not report usage in its stream"),
        (["{"], 200, "endpoint e streamed something else than chunks"),
        ([{"error": {"message": "no\nroom"}}], 200, "endpoint e failed: .*room"),
        (["busy"], 503, "endpoint e answered 503 at http.*/v1/chat/completions: data: busy"),
    ],
)
def test_a_server_that_cannot_be_measured_is_named_in_one_line(
    events: list[Any], status: int, message: str
) -> None:
    with small_server(events, status) as url:
        endpoint = Endpoint("e", url)
        with pytest.raises(EagleError, match=message) as error:
            endpoint.answer([(0, JOB)], 1, SamplingParams())
    assert "\n" not in str(error.value)


def test_a_server_that_is_not_there_is_told_before_a_report_is_begun(
    target_folder: Path, tmp_path: Path
) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and not listening
        config = BenchConfig(
            target=str(target_folder),
            drafters="none,ngram",
            endpoint=[f"gone=http://127.0.0.1:{bound.getsockname()[1]}"],
            prompts=["builtin:eval"],
            concurrency="1",
            output=str(tmp_path / "report"),
        )
        with pytest.raises(EagleError, match="gone"):
            stage.run(config, Reporter(quiet=True))
    assert artifact_state(config.output) == "missing"
