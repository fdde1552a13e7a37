"""Claims about servers that hang, break off or never stop: the run ends in one line and keeps what it has."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from stages.artifacts import artifact_state, open_artifact
from stages.bench import reply, stage
from stages.bench.config import BenchConfig
from stages.bench.endpoint import Endpoint
from stages.bench.report import BenchReport
from stages.decoding import SamplingParams
from stages.errors import EagleError
from stages.progress import Reporter
from tests.bench.test_endpoint import JOB, USAGE, chunk
from tests.tiny import write_jsonl

Script = Callable[[socket.socket], None]
PATIENCE = 0.4
OK = b"HTTP/1.1 200 OK\r\n"
OPEN = OK + b"\r\n"  # ends when the connection does


def event(content: object) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


WHOLE = OPEN + event(chunk("a")) + event(USAGE) + b"data: [DONE]\n\n"


def whole_request(link: socket.socket) -> bytes:
    """To close a connection with some of it unread would reset the connection."""
    got = link.recv(1 << 16)
    if not got.startswith((b"GET", b"POST")):
        return got
    while b"\r\n\r\n" not in got:
        got += link.recv(1 << 16)
    head, _, body = got.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)^content-length: *(\d+)", head, re.M)
    while length and len(body) < int(length[1]):
        body += link.recv(1 << 16)
    return head + body


@contextmanager
def server(*scripts: Script, models: tuple[str, ...] = ("m",)) -> Iterator[str]:
    """Names its models when asked, and then does to each further connection what the next script says; the
    last one again and again."""
    left = list(scripts)
    listing = json.dumps({"data": [{"id": each} for each in models]}).encode()

    def serve(link: socket.socket) -> None:
        with link, suppress(OSError):
            asked = whole_request(link)
            if asked.startswith(b"GET"):
                link.sendall(OK + b"Content-Length: %d\r\n\r\n" % len(listing) + listing)
            else:
                (left.pop(0) if len(left) > 1 else left[0])(link)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def says(content: bytes) -> Script:
    return lambda link: link.sendall(content)


def stalls(content: bytes) -> Script:
    """Sends it, and then nothing, but stays."""

    def script(link: socket.socket) -> None:
        link.sendall(content)
        link.recv(1)

    return script


def repeats(content: bytes, *, begin: bytes = OPEN, pause: float = 0.02) -> Script:
    def script(link: socket.socket) -> None:
        link.sendall(begin)
        while True:
            link.sendall(content)
            time.sleep(pause)

    return script


@pytest.mark.parametrize(
    ("script", "message"),
    [
        pytest.param(stalls(b""), "hangs at .*/chat/completions: nothing more came for 0.4 s", id="silent"),
        pytest.param(stalls(OPEN), "hangs at .*: nothing more came for 0.4 s", id="headers only"),
        pytest.param(stalls(OPEN + event(chunk("a"))), "hangs at .*: nothing more came", id="in the middle"),
        pytest.param(repeats(b"x"), "hangs at .*: nothing more came for 0.4 s", id="drips"),
        pytest.param(repeats(b": alive\n\n"), "no token came for 2 s, though its stream", id="comments"),
        pytest.param(repeats(event(chunk(""))), "no token came for 2 s, though its stream", id="no text"),
        pytest.param(
            repeats(event(chunk("a")), pause=0), "goes on behind the 4 tokens asked for", id="forever"
        ),
        pytest.param(repeats(b"x" * 4096, pause=0), "it sent a line of over 20000 bytes", id="one line"),
        pytest.param(
            says(b"220 mail\r\n\r\n"), "cannot be used at .*: see that the server runs", id="no HTTP"
        ),
        pytest.param(says(b""), "cannot be used at .*without response", id="closes"),
        pytest.param(says(OPEN + event(chunk("a"))), "broke off in the middle of an answer", id="drops"),
        pytest.param(
            says(OK + b"Content-Length: 999\r\n\r\n" + event(chunk("a"))), "broke off in the", id="too short"
        ),
        pytest.param(
            says(OK + b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: {}\n\r\n"),
            "cannot be used at .*IncompleteRead",
            id="chunks without an end",
        ),
        pytest.param(says(OPEN + b"data: [1]\n\n"), "something else than chunks", id="no object"),
        pytest.param(says(OPEN + event({"choices": "x"})), "something else than chunks", id="no choices"),
        pytest.param(says(OPEN + b"data: \xff\xfe\n\n"), "something else than chunks", id="no UTF-8"),
        pytest.param(says(OPEN + event({"usage": {}}) + b"data: [DONE]\n"), "not report usage", id="empty"),
        pytest.param(
            says(WHOLE.replace(b'"completion_tokens": 7', b'"completion_tokens": 0')),
            "answered 1 requests without a single token",
            id="no tokens",
        ),
        pytest.param(
            says(b"HTTP/1.1 401 No\r\n\r\nwho?"), "answered 401 .*: who\\?; OPENAI_API_KEY is where", id="401"
        ),
        pytest.param(says(b"HTTP/1.1 404 No\r\n\r\n"), "answered 404 .*the /v1.*#MODEL", id="404"),
        pytest.param(says(b"HTTP/1.1 429 No\r\n\r\nslow"), "answered 429 .*: slow; a lower", id="429"),
        pytest.param(stalls(b"HTTP/1.1 500 No\r\n\r\n"), "answered 500 at .*", id="500 that hangs"),
    ],
)
def test_a_server_that_misbehaves_ends_the_run_in_one_line(
    script: Script, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply, "LONGEST_LINE", 20_000)
    with server(script) as url:
        # Little where nothing comes, whatever else the machine does; enough where something must come.
        patience = 2.0 if "though" in message else PATIENCE if "nothing more" in message else 60.0
        endpoint = Endpoint("e", url, patience)
        with pytest.raises(EagleError, match=message) as raised:
            endpoint.warm_up(JOB, 1, SamplingParams(max_new_tokens=4))
    assert "\n" not in str(raised.value)


def test_a_host_that_takes_no_connection_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]  # nobody accepts them
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        with pytest.raises(EagleError, match=r"hangs at .*/v1/models: it takes no connection"):
            Endpoint("e", f"http://127.0.0.1:{address[1]}")
        for each in waiting:
            each.close()


def test_a_server_without_tls_is_not_asked_over_tls() -> None:
    with server(says(WHOLE)) as url, pytest.raises(EagleError, match=r"cannot be used at https://.*SSL"):
        Endpoint("e", url.replace("http:", "https:"))


def test_of_several_models_the_one_that_is_named_is_asked() -> None:
    with server(says(WHOLE), models=("first", "second")) as url:
        assert [Endpoint("e", each).model for each in (url, f"{url}/v1#second")] == ["first", "second"]
        with pytest.raises(EagleError, match="has no model third: it serves first, second"):
            Endpoint("e", f"{url}#third")


def test_one_failure_ends_the_others_that_would_wait() -> None:
    left = threading.Semaphore(0)

    def waits(link: socket.socket) -> None:
        stalls(OPEN)(link)
        left.release()

    with server(waits, waits, says(b"HTTP/1.1 500 No\r\n\r\n")) as url:
        endpoint = Endpoint("e", url, patience=3600.0)
        with pytest.raises(EagleError, match="answered 500"):
            endpoint.answer([(number, JOB) for number in range(3)], 3, SamplingParams())
        assert left.acquire(timeout=30.0)
        assert left.acquire(timeout=30.0)


def test_what_was_measured_is_kept_and_the_same_command_goes_on(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [{"id": str(number), "prompt": f"write line {number}"} for number in range(4)]
    # Two answers to warm up and two more; then it breaks off.
    with server(*[says(WHOLE)] * 4, says(OPEN + event(chunk("a"))), says(WHOLE)) as url:
        config = BenchConfig(
            target=str(target_folder),
            drafters="none,ngram",
            endpoint=[f"e={url}"],
            prompts=[str(write_jsonl(tmp_path / "chat.jsonl", prompts))],
            output=str(tmp_path / "report"),
            max_new_tokens=4,
            device="cpu",
            dtype="float32",
        )
        told = "broke off .*; what was measured before is kept at .*report, and the same command goes on"
        with pytest.raises(EagleError, match=told):
            stage.run(config, Reporter(quiet=True))
        assert artifact_state(config.output) == "partial"
        kept = {path.name: path.read_bytes() for path in Path(config.output).glob("*.jsonl")}
        assert {name.partition("-")[0] for name in kept} == {"requests", "sweep"}
        stage.run(config, Reporter(quiet=True))
    now = {path.name: path.read_bytes() for path in Path(config.output).glob("*.jsonl")}
    assert kept.items() < now.items()
    report = BenchReport.model_validate_json(open_artifact(config.output, "report").read("report.json"))
    assert [level.completed for level in report.sweep.levels] == [4, 4, 4]
