"""A server on a free loopback port, in a thread of the test's own process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from stages.decoding import EagleModel
from stages.serve.app import Access, create_app
from stages.serve.engine_thread import EngineThread
from stages.serve.request_log import LogFormat
from stages.serve.served_model import ServedModel
from stages.serve.server import Server, bind, url

NAME = "tiny"


@dataclass
class RunningServer:
    """The server, its engine, and what it has logged."""

    url: str
    server: Server
    engine: EngineThread
    log: list[str] = field(default_factory=list)
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        """A client that does not try again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def metrics(self) -> dict[str, float]:
        """What `/metrics` shows, by name with labels."""
        lines = self.client.get(f"{self.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def chat(self, content: str = "hello", **fields: Any) -> httpx.Response:
        """One request of one user message, as raw HTTP."""
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.client.post(f"{self.url}/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        """One request to go on from a prompt, as raw HTTP."""
        return self.client.post(f"{self.url}/v1/completions", json={"prompt": prompt, **fields})


@contextmanager
def running_server(
    model: EagleModel,
    *,
    max_queue: int = 64,
    max_length: int | None = None,
    access: Access | None = None,
    log_format: LogFormat = "text",
    proxies: Sequence[str] = (),
) -> Iterator[RunningServer]:
    """Serves `model` under the name "tiny" for as long as the block lasts."""
    listener = bind("127.0.0.1", 0)
    engine = EngineThread(model.engine, max_queue)
    log: list[str] = []
    ready = threading.Event()
    served = ServedModel.of(model.target, NAME, max_length)
    app = create_app(served, engine, log.append, access=access, log_format=log_format)
    server = Server(app, listener, engine, ready=ready.set, proxies=proxies)
    running = RunningServer(url(listener), server, engine, log)
    engine.start()
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(20)
        yield running
    finally:
        running.client.close()
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def soon(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether `condition` comes true within some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
