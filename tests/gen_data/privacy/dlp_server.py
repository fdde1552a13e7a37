"""The part of the HTTP API of Google's Sensitive Data Protection that inspects content, on loopback.

It finds e-mail addresses, phone numbers, IP addresses and the word "Ada", keeps the real limits of a request,
and fails on demand.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_BYTES, MAX_VALUES, MAX_FINDINGS = 524_288, 50_000, 3_000
PATH = re.compile(r"/v2/projects/(?P<project>[^/]+)/locations/(?P<location>[^/]+)/content:inspect\?.*")
FORMS = {
    "EMAIL_ADDRESS": (re.compile(r"[\w.]+@[\w.]+\w", re.ASCII), 4),
    "PHONE_NUMBER": (re.compile(r"\d{3}-\d{3}-\d{4}"), 3),
    "IP_ADDRESS": (re.compile(r"\d+\.\d+\.\d+\.\d+"), 4),
    "PERSON_NAME": (re.compile(r"Ada"), 2),
}
"""What is found, and how likely it is, from 1 (VERY_UNLIKELY) to 5."""


@dataclass
class DlpServer:
    """Attributes:
    endpoint: its address.
    requests: the texts of every request that was answered, probes left out.
    failures: status codes for the next requests, before any is answered.
    refused: a text that no request may hold; answered with 400 and a message that quotes it.
    row: overrides the row of every finding.
    """

    endpoint: str = ""
    requests: list[list[str]] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    refused: str | None = None
    row: int | None = None
    asked: int = 0
    configs: list[dict[str, Any]] = field(default_factory=list)

    def inspect(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        self.asked += 1
        if self.failures:
            code = self.failures.pop(0)
            return code, _error(code, "failed as it was told to")
        request = json.loads(body)
        config, table = request["inspectConfig"], request["item"]["table"]
        texts = [value["stringValue"] for row in table["rows"] for value in row["values"]]
        if not PATH.fullmatch(path):
            return 404, _error(404, f"no such method {path}")
        if len(body) > MAX_BYTES or len(texts) > MAX_VALUES:
            return 400, _error(400, "the request is too large")
        wrong = [each["name"] for each in config["infoTypes"] if each["name"] not in KNOWN]
        if wrong:
            return 400, _error(400, f"unknown info types {wrong}")
        if self.refused is not None and any(self.refused in text for text in texts):
            return 400, _error(400, f"cannot inspect {self.refused}")
        self.configs.append(config)
        if texts != ["Is everything as it should be?"]:
            self.requests.append(texts)
        return 200, {"result": self._result(config, texts)}

    def _result(self, config: dict[str, Any], texts: list[str]) -> dict[str, Any]:
        names = {each["name"] for each in config["infoTypes"]}
        found = [
            {
                "infoType": {"name": name},
                "likelihood": likelihood,
                "location": {
                    "codepointRange": {"start": str(match.start()), "end": str(match.end())},
                    "contentLocations": [
                        {
                            "recordLocation": {
                                "tableLocation": {"rowIndex": str(row if self.row is None else self.row)}
                            }
                        }
                    ],
                },
            }
            for row, text in enumerate(texts)
            for name, (form, likelihood) in FORMS.items()
            if name in names and likelihood >= config["minLikelihood"]
            for match in form.finditer(text)
        ]
        return {"findings": found[:MAX_FINDINGS], "findingsTruncated": len(found) > MAX_FINDINGS}


KNOWN = {
    *FORMS, "CREDIT_CARD_NUMBER", "IBAN_CODE", "US_SOCIAL_SECURITY_NUMBER", "LOCATION", "STREET_ADDRESS",
    "DATE", "TIME",
}  # fmt: skip


def _error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "status": "x"}}


@contextmanager
def running_dlp_server() -> Iterator[DlpServer]:
    state = DlpServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            code, answer = state.inspect(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
