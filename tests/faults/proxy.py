"""A proxy in front of the storage server that does to requests what networks and stores do to them.

Requests are forwarded as they are until a `Fault` matches one. The faults are those a client can see: answers
with an error, connections that break before, in or after a body, answers that never come, bytes that are lost
or changed on the way, clocks that are wrong, and a store that is gone.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length"}
_TIMES = re.compile(rb'"(updated|timeCreated)":"([^"]+)"')
_GONE = "The specified bucket does not exist."


@dataclass(frozen=True)
class Request:
    """One request to the store.

    Attributes:
        action: "upload" (whole, or begin of a resumable one), "part", "read", "stat", "list" or "delete".
        name: the object's name in its bucket; "" for a list and a part.
        exclusive: whether an upload may only make the object, not replace it.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    action: str = ""
    name: str = ""
    exclusive: bool = False


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class BrokenOffError(Exception):
    """The connection to the client is to be closed without a further byte."""


Match = Callable[[Request], bool]
Send = Callable[[Request], Answer]
Deed = Callable[[Request, Send], Answer]


@dataclass
class Fault:
    """What happens to requests that match: not to the first `after`, then to `times` of them (None: all)."""

    deed: Deed
    match: Match = lambda request: True
    after: int = 0
    times: int | None = 1
    seen: int = 0
    done: int = 0

    def takes(self, request: Request) -> bool:
        """Counts a request; whether this is one to be faulted."""
        if not self.match(request):
            return False
        self.seen += 1
        if self.seen <= self.after or (self.times is not None and self.done >= self.times):
            return False
        self.done += 1
        return True


def to(action: str, name: str = "") -> Match:
    """Requests of an action whose object's name contains `name`."""
    return lambda request: request.action == action and name in request.name


def since(match: Match) -> Match:
    """Every request from the first on that matches."""
    begun = False

    def matches(request: Request) -> bool:
        nonlocal begun
        begun = begun or match(request)
        return begun

    return matches


# Deeds


def answers(status: int, message: str = "a fault made by the test") -> Deed:
    """The store answers with an error and does nothing."""
    body = json.dumps({"error": {"code": status, "message": message}}).encode()
    return lambda request, send: Answer(status, {"Content-Type": "application/json"}, body)


bucket_gone = answers(404, _GONE)


def lists_nothing(request: Request, send: Send) -> Answer:
    """A list that does not yet know any object."""
    answer, body = send(request), b'{"kind": "storage#objects"}'
    return replace(answer, body=body, headers=answer.headers | {"Content-Length": str(len(body))})


def breaks_before(request: Request, send: Send) -> Answer:
    """The connection breaks before the store has seen the request."""
    raise BrokenOffError


def breaks_within(request: Request, send: Send) -> Answer:
    """The connection breaks when the store has half of the request's body."""
    send(replace(request, body=request.body[: len(request.body) // 2]))  # raises BrokenOffError
    raise AssertionError


def breaks_after(request: Request, send: Send) -> Answer:
    """The store does what it was asked, and the connection breaks before its answer is back."""
    send(request)
    raise BrokenOffError


def cuts_answer(request: Request, send: Send) -> Answer:
    """The connection breaks in the middle of the answer's body."""
    answer = send(request)
    return replace(answer, body=answer.body[: len(answer.body) // 2])  # its Content-Length stays


def shortens_answer(request: Request, send: Send) -> Answer:
    """The answer's body ends early and its length says so: no protocol error."""
    answer = send(request)
    body = answer.body[: len(answer.body) // 2]
    return replace(answer, body=body, headers=answer.headers | {"Content-Length": str(len(body))})


def flips_answer(request: Request, send: Send) -> Answer:
    """One bit of the answer's body changes on the way."""
    answer = send(request)
    return replace(answer, body=_flipped(answer.body))


def flips_upload(request: Request, send: Send) -> Answer:
    """One bit of an uploaded object changes on the way to the store."""
    end = len(request.body) - len(b"\n--==0==--") if request.action == "upload" else len(request.body)
    return send(replace(request, body=_flipped(request.body, end)))


class Hold:
    """Stops a request until it is let go; `late` ones reach the store only then, others already have.

    Attributes:
        reached: set once a request is held.
    """

    def __init__(self, *, late: bool) -> None:
        self.late = late
        self.reached = threading.Event()
        self._go = threading.Event()

    def __call__(self, request: Request, send: Send) -> Answer:
        answer = None if self.late else send(request)
        self.reached.set()
        self._go.wait(120)
        return send(request) if answer is None else answer

    def let_go(self) -> None:
        self._go.set()


class Proxy(ThreadingHTTPServer):
    """Attributes:
    faults: those in force; the first that takes a request is done to it.
    requests: all there were, in order.
    clock_shift: how wrong the store's clock is, in `Date` headers and in the times of objects.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, server_url: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Requests)
        self.server_url = server_url
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.clock_shift = timedelta()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fault(
        self, deed: Deed, match: Match = lambda request: True, *, after: int = 0, times: int | None = 1
    ) -> Fault:
        """Puts a fault in force, before the others."""
        made = Fault(deed, match, after, times)
        with self.lock:
            self.faults.insert(0, made)
        return made

    def heal(self) -> None:
        """Takes every fault back and forgets the requests."""
        with self.lock:
            for fault in self.faults:
                if isinstance(fault.deed, Hold):
                    fault.deed.let_go()
            self.faults.clear()
            self.requests.clear()
            self.clock_shift = timedelta()

    def deed_for(self, request: Request) -> Deed | None:
        with self.lock:
            self.requests.append(request)
            return next((fault.deed for fault in self.faults if fault.takes(request)), None)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone, killed perhaps, is no error of the proxy's."""


@contextmanager
def running_proxy(server_url: str, port: int = 0) -> Iterator[Proxy]:
    proxy = Proxy(server_url, port)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.heal()
        proxy.shutdown()
        proxy.server_close()
        thread.join()


@contextmanager
def silent_port() -> Iterator[int]:
    """A port of loopback that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        taken: list[socket.socket] = []

        def take() -> None:
            with suppress(OSError):
                while True:
                    taken.append(listener.accept()[0])

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for connection in taken:
                connection.close()


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer; two would wait for each other
    server: Proxy

    def setup(self) -> None:
        super().setup()
        self.upstream: HTTPConnection | None = None

    def finish(self) -> None:
        if self.upstream is not None:
            self.upstream.close()
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        request = _named(Request(self.command, self.path, dict(self.headers.items()), body))
        deed = self.server.deed_for(request)
        try:
            answer = self._send(request) if deed is None else deed(request, self._send)
            self._reply(answer)
        except (BrokenOffError, OSError, HTTPException):
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _pass_on  # noqa: N815

    def _send(self, request: Request) -> Answer:
        """Forwards a request; one whose body was cut breaks off where it was cut."""
        if self.upstream is None:
            self.upstream = HTTPConnection(self.server.server_url.removeprefix("http://"), timeout=120)
        upstream = self.upstream
        upstream.putrequest(request.method, request.path, skip_accept_encoding=True, skip_host=True)
        for key, value in request.headers.items():
            upstream.putheader(key, value)
        upstream.endheaders(request.body or None)
        whole = int(request.headers.get("Content-Length", "0"))
        if len(request.body) < whole:
            upstream.close()
            raise BrokenOffError
        return self._as_from_here(upstream.getresponse())

    def _as_from_here(self, response: HTTPResponse) -> Answer:
        """The store's answer with this proxy's address and clock in it."""
        body = response.read()
        headers = {key: value for key, value in response.getheaders() if key.lower() not in _HOP_BY_HOP}
        if "Location" in headers:
            headers["Location"] = headers["Location"].replace(self.server.server_url, self.server.url)
        if shift := self.server.clock_shift:
            if "Date" in headers:
                headers["Date"] = format_datetime(parsedate_to_datetime(headers["Date"]) + shift, usegmt=True)
            if headers.get("Content-Type", "").startswith("application/json"):
                body = _TIMES.sub(lambda found: _shifted(found, shift), body)
        return Answer(response.status, headers | {"Content-Length": str(len(body))}, body)

    def _reply(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        length = answer.headers.get("Content-Length", str(len(answer.body)))
        for key, value in (answer.headers | {"Content-Length": length}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(answer.body)
        self.wfile.flush()
        if int(length) > len(answer.body):
            raise BrokenOffError


def _named(request: Request) -> Request:
    """The request with what it is about, as `https://cloud.google.com/storage/docs/json_api` has it."""
    url = urlsplit(request.path)
    query = parse_qs(url.query)
    name = unquote(url.path.partition("/o/")[2])
    if "/upload/" in url.path:
        if "upload_id" in query:
            return replace(request, action="part")
        if "name" in query:
            name = query["name"][0]
        elif (found := re.search(rb"\n\n(\{.*?\})\n--", request.body, re.DOTALL)) is not None:
            name = json.loads(found[1])["name"]
        return replace(request, action="upload", name=name, exclusive="ifGenerationMatch" in query)
    if request.method == "DELETE":
        action = "delete"
    elif not name:
        action = "list"
    else:
        action = "read" if query.get("alt") == ["media"] else "stat"
    return replace(request, action=action, name=name)


def _flipped(data: bytes, end: int | None = None) -> bytes:
    at = (len(data) if end is None else end) - 1
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _shifted(found: re.Match[bytes], shift: timedelta) -> bytes:
    time = datetime.fromisoformat(found[2].decode()) + shift
    return b'"%s":"%s"' % (found[1], time.isoformat().replace("+00:00", "Z").encode())
