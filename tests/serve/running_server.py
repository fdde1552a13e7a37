"""A server on a free loopback port, in a thread of the test's own process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from stages.decoding import EagleModel
from stages.serve.app import create_app
from stages.serve.engine_thread import EngineThread
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

    def openai(self) -> openai.OpenAI:
        """A client that does not try again."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def chat(self, content: str = "hello", **fields: Any) -> httpx.Response:
        """One request of one user message, as raw HTTP."""
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)


@contextmanager
def running_server(model: EagleModel, *, max_queue: int = 64) -> Iterator[RunningServer]:
    """Serves `model` under the name "tiny" for as long as the block lasts."""
    listener = bind("127.0.0.1", 0)
    engine = EngineThread(model.engine, max_queue)
    log: list[str] = []
    ready = threading.Event()
    app = create_app(ServedModel.of(model.target, NAME), engine, log.append)
    server = Server(app, listener, engine, ready=ready.set)
    running = RunningServer(url(listener), server, engine, log)
    engine.start()
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(20)
        yield running
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def soon(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether `condition` comes true within some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
