"""The HTTP server: its socket, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import uvicorn
from fastapi import FastAPI

from stages.errors import EagleError
from stages.serve.engine_thread import EngineThread

GRACE_S = 10.0
FLUSH_S = 2.0
# Longer than clients keep a connection that they do not use (5 s and more): it must not be closed just when
# one of them sends its next request.
KEEP_ALIVE_S = 75
# A terminal that is closed sends SIGHUP; who started the server with nohup has it ignored.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def bind(host: str, port: int) -> socket.socket:
    """Takes an address, without listening yet: early, so that a wrong one shows before any model is loaded.

    Raises:
        EagleError: the host is unknown, or the port is in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise EagleError(
            f"--host {host} cannot be resolved ({error.strerror}); use an address of this machine"
        ) from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {host} port {port} ({(error.strerror or str(error)).lower()})"
        raise EagleError(f"{reason}; choose another --host or --port, 0 for any free port") from None
    return listener


def url(listener: socket.socket) -> str:
    """Base URL of a bound socket, as a client on this machine reaches it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn over one bound socket and one engine.

    SIGINT, SIGTERM and SIGHUP end it: requests that wait or come from then on are turned away, those that run
    have `grace_s` seconds to finish, and a second signal ends them at the next step. It listens until they
    have, so that whoever asks hears that it stops. `run` then returns, so that the process can exit with 0.

    Args:
        ready: called once connections are accepted.
        stopping: called once when it begins to stop.
        grace_s: seconds that running requests have from then on.
        proxies: addresses and networks whose word for who asks is taken.
    """

    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        engine: EngineThread,
        *,
        ready: Callable[[], None] = lambda: None,
        stopping: Callable[[], None] = lambda: None,
        grace_s: float = GRACE_S,
        proxies: Sequence[str] = (),
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="error",  # a warning of uvicorn's is what any stranger can cause
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                # By default uvicorn believes whoever asks from this machine.
                proxy_headers=bool(proxies),
                forwarded_allow_ips=list(proxies),
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._listener = listener
        self._engine = engine
        self._ready = ready
        self._stopping = stopping
        self._grace_s = grace_s

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until a signal or `stop`; returns when the last answer is out and the engine has ended."""
        try:
            super().run(sockets if sockets is not None else [self._listener])
        finally:
            self._engine.stop(0.0)
            self._engine.join()

    def stop(self) -> None:
        """Begins to stop, as the first signal does. From any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        self._engine.stop(self._grace_s)
        while self._engine.alive:
            await asyncio.sleep(0.05)
        watch = asyncio.create_task(self._drop_slow_readers())
        await super().shutdown(sockets)
        watch.cancel()

    async def _drop_slow_readers(self) -> None:
        """Closes the connections whose clients are slow to take their answers, the engine being done."""
        await asyncio.sleep(FLUSH_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._grace_s = 0.0
            self._engine.hurry()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, does not raise the signals again at the end: what they asked for has happened."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = [sig for sig in SIGNALS if signal.getsignal(sig) is not signal.SIG_IGN]
        before = {sig: signal.signal(sig, self.handle_exit) for sig in heard}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)
