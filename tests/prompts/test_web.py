from __future__ import annotations

import gzip
import io
import json
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.errors import EagleError
from stages.prompts import read_prompts, web

TEXTS = [f"question {i} {'x' * 100}" for i in range(2000)]
LINES = "".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS).encode()


def table() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"prompt": TEXTS}), buffer)
    return buffer.getvalue()


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr("p.jsonl", LINES)
    return buffer.getvalue()


class Server(BaseHTTPRequestHandler):
    """No ranges, no lengths, no types: as little as a web server may do."""

    protocol_version = "HTTP/1.1"
    busy = 0

    def log_message(self, *_: object) -> None:
        pass

    def send(self, code: int, body: bytes = b"", headers=(), length: int | None = None) -> None:
        self.send_response(code)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Connection", "close")
        if length is not None or code != 200:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def do_GET(self) -> None:
        name = self.path.split("?")[0]
        if name.startswith("/status"):
            self.send(int(name[7:10]))
        elif name == "/moved.jsonl":
            self.send(302, headers=[("Location", "/p.jsonl")])
        elif name == "/round.jsonl":
            self.send(302, headers=[("Location", name)])
        elif name == "/busy.jsonl" and Server.busy < 2:
            Server.busy += 1
            self.send(503)
        elif name == "/encoded.jsonl.gz":
            self.send(200, gzip.compress(LINES), [("Content-Encoding", "gzip")])
        elif name == "/page":
            self.send(200, b"<!DOCTYPE html>\n<html>log in</html>", [("Content-Type", "text/html")])
        elif name == "/short.jsonl":
            self.send(200, LINES[:5000], length=len(LINES))
        elif name == "/silent.jsonl":
            threading.Event().wait(1.5)
        else:
            self.send(200, table() if "parquet" in name else archive() if "zip" in name else LINES)


@pytest.fixture(scope="module")
def address():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "name",
    ["p.jsonl", "p.jsonl?download=true&x=1", "moved.jsonl", "busy.jsonl", "encoded.jsonl.gz", "no-ending",
     "download?file=p.jsonl", "p.parquet", "p.zip"],
)  # fmt: skip
def test_files_are_read_from_whatever_server(address, name):
    found = read_prompts(f"{address}/{name}")
    assert [prompt.turns[0] for prompt in found] == TEXTS
    assert found[0].id == f"{'p.jsonl' if name == 'p.zip' else name.split('?')[0]}:1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("status404.jsonl", "the server answers 404 Not Found"),
        ("status401.jsonl", "the server answers 401 Unauthorized"),
        ("status500.jsonl", "the server answers 500 Internal Server Error"),
        ("status599.jsonl", "the server answers 599"),
        ("round.jsonl", "too many redirects"),
        ("page", "is a web page"),
        ("short.jsonl", "breaks off"),
        ("silent.jsonl", "cannot be reached"),
    ],
)
def test_what_a_server_does_not_give_is_said_in_one_line(address, name, message, monkeypatch):
    monkeypatch.setattr(web, "READ_S", 0.3)
    monkeypatch.setattr(web, "_PAUSE_S", 0.01)
    with pytest.raises(EagleError, match=message) as caught:
        read_prompts(f"{address}/{name}")
    assert str(caught.value).startswith(f"{address}/{name} ")
    assert "\n" not in str(caught.value)


def test_no_server_is_one_line(monkeypatch):
    monkeypatch.setattr(web, "_PAUSE_S", 0.01)
    with pytest.raises(EagleError, match="cannot be reached") as caught:
        read_prompts("http://127.0.0.1:1/p.jsonl")
    assert "\n" not in str(caught.value)
