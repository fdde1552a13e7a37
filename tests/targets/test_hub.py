"""Targets that are hub ids, where the hub cannot be reached or has none of that name."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants as hub
import pytest

from stages.errors import EagleError
from stages.targets import load_target
from stages.targets.hub import at_hand
from stages.targets.tokenizer import load_tokenizer

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "ENDPOINT", NOWHERE)


def refusal(name: str) -> str:
    with pytest.raises(EagleError) as refused:
        at_hand(name)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("load", [load_target, load_tokenizer])
def test_a_hub_that_does_not_answer_is_asked_once(load, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        EagleError, match="org/away is no local folder, and the hub does not answer"
    ) as refused:
        load("org/away")
    assert "\n" not in str(refused.value)
    assert "Retry" not in capfd.readouterr().err


def test_what_was_fetched_before_is_used_while_the_hub_does_not_answer(
    tiny_path: str, tmp_path: Path
) -> None:
    model, commit = tmp_path / "hub" / "models--org--tiny", "0" * 40
    shutil.copytree(tiny_path, model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    target = load_target("org/tiny", device="cpu", dtype="float32")
    assert target.name == "org/tiny"
    assert target.fingerprint.weights == load_target(tiny_path, device="cpu").fingerprint.weights


def test_a_name_that_the_hub_does_not_have_is_told_from_one_that_cannot_be(monkeypatch) -> None:
    with answering(404, "RepoNotFound") as url:
        monkeypatch.setattr(hub, "ENDPOINT", url)
        assert "org/none is no local folder, and the hub has no such model" in refusal("org/none")
    assert "a b is neither a folder nor a hub id" in refusal("a b")


def test_a_mirror_that_answers_for_files_only_is_left_to_the_loader(monkeypatch) -> None:
    with answering(501) as url:
        monkeypatch.setattr(hub, "ENDPOINT", url)
        assert at_hand("org/mirrored") == "org/mirrored"


@contextmanager
def answering(status: int, code: str = "") -> Iterator[str]:
    """A hub that gives every request this answer."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"error": code}).encode()
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
