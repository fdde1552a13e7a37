"""A small HTTP server that speaks OpenAI's API, as well or as badly as a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stages.targets import Target

Sampled = tuple[list[int], str]
"""Ids, and why they ended."""


@dataclass
class Fleet:
    """What the server is like.

    Attributes:
        sample: the answer to a prompt.
        models: as `/v1/models` lists them; None does not list them.
        completions, token_ids: whether it has that endpoint, and `return_token_ids`.
        strict: refuses fields beyond OpenAI's own.
        fault: what goes wrong with a request, by its number: a status, "drop", "truncate", "html" or None.
        key: what it wants to see.
        extra_tokens: how many more tokens it finds in a prompt than the target does.
        change: made to the text of an answer.
    """

    target: Target
    sample: Callable[[list[int]], Sampled]
    models: list[dict[str, Any]] | None = field(default_factory=list)
    completions: bool = True
    token_ids: bool = True
    strict: bool = False
    fault: Callable[[int], int | str | None] = lambda number: None
    key: str | None = None
    extra_tokens: int = 0
    change: Callable[[str], str] = lambda text: text
    requests: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[str]:
        """The server's address."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def reply(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        known = {"model", "max_tokens", "temperature", "top_p", "seed", "prompt", "messages", "tools"}
        extra = body.keys() - known - (set() if self.strict else {"top_k", "repetition_penalty", "min_p"})
        extra -= set() if self.strict else {"frequency_penalty", "presence_penalty"}
        if self.token_ids:
            extra.discard("return_token_ids")
        if extra:
            return 400, {"error": {"message": f"unknown: {sorted(extra)}"}}
        if path == "/v1/completions" and self.completions:
            prompt = body["prompt"]
        elif path == "/v1/chat/completions":
            prompt = self.target.render(body["messages"])
        else:
            return 404, {"detail": "Not Found"}
        ids, reason = self.sample(prompt)
        ids = ids[: body["max_tokens"]]
        text = self.change(self.target.decode(ids[:-1] if reason == "stop" else ids))
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        choice |= {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        usage = {"prompt_tokens": len(prompt) + self.extra_tokens, "completion_tokens": len(ids)}
        return 200, {"choices": [choice], "usage": usage}


def _handler(fleet: Fleet) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self._may_enter():
                listed = fleet.models is not None and self.path == "/v1/models"
                self._send(200 if listed else 404, {"data": fleet.models} if listed else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self._may_enter():
                return
            fleet.requests.append(body)
            fault = fleet.fault(len(fleet.requests) - 1)
            if fault == "drop":
                self.close_connection = True
            elif isinstance(fault, int):
                self._send(fault, {"error": {"message": "not now"}}, {"Retry-After": "0"})
            else:
                status, reply = fleet.reply(self.path, body)
                self._send(status, reply, fault=fault)

        def _may_enter(self) -> bool:
            allowed = fleet.key is None or self.headers.get("Authorization") == f"Bearer {fleet.key}"
            if not allowed:
                self._send(401, {"error": {"message": "no such key"}})
            return allowed

        def _send(
            self, status: int, reply: Any, headers: dict[str, str] | None = None, fault: str | None = None
        ) -> None:
            data = b"<html>" if fault == "html" else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if fault == "truncate":
                data = data[: len(data) // 2]
                self.close_connection = True
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
