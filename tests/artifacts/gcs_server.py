"""A Google Cloud Storage server in memory: as much of the JSON API as whole-object writes and reads use.

The real client is pointed at it with `STORAGE_EMULATOR_HOST`, so tests send real requests to a real socket.
"""

from __future__ import annotations

import hashlib
import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class GcsServer(ThreadingHTTPServer):
    """Attributes: `objects` by (bucket, name); `buckets` that exist; `forbidden` ones answer 403."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.objects: dict[tuple[str, str], bytes] = {}
        self.buckets = {"bucket"}
        self.forbidden: set[str] = set()
        self.uploads: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running_gcs_server() -> Iterator[GcsServer]:
    server = GcsServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer; two would wait for each other
    server: GcsServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        bucket, name, query = self._address()
        if self._refused(bucket):
            return
        if name is None:
            prefix = query.get("prefix", [""])[0]
            names = sorted(n for b, n in self.server.objects if b == bucket and n.startswith(prefix))
            self._reply(200, {"items": [self._resource(bucket, found) for found in names]})
        elif (bucket, name) not in self.server.objects:
            self._reply(404, {"error": {"code": 404, "message": f"No such object: {bucket}/{name}"}})
        elif query.get("alt") == ["media"]:
            data = self.server.objects[bucket, name]
            first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            self._reply(200, data[int(first) : int(last) + 1 if last else None])
        else:
            self._reply(200, self._resource(bucket, name))

    def do_POST(self) -> None:
        bucket, _, query = self._address()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._refused(bucket):
            return
        if "session" in query:
            self._take_part(bucket, query["session"][0], body)
        elif query["uploadType"] == ["resumable"]:
            name = json.loads(body)["name"]
            location = f"{self.server.url}/upload/storage/v1/b/{bucket}/o?session={name}"
            self.server.uploads[name] = b""
            self._reply(200, {}, {"Location": location})
        else:
            edge = b"\n--" + self.headers["Content-Type"].split('boundary="')[1].rstrip('"').encode()
            _, resource, media = (b"\n" + body).split(edge, 2)
            name = json.loads(resource.split(b"\n\n", 1)[1])["name"]
            self._store(bucket, name, media.split(b"\n\n", 1)[1].rpartition(edge)[0])

    def do_DELETE(self) -> None:
        bucket, name, _ = self._address()
        found = self.server.objects.pop((bucket, name or ""), None)
        self._reply(404 if found is None else 204, b"")

    def _take_part(self, bucket: str, name: str, part: bytes) -> None:
        self.server.uploads[name] += part
        total = int(self.headers["Content-Range"].rsplit("/", 1)[1])
        if len(self.server.uploads[name]) == total:
            self._store(bucket, name, self.server.uploads.pop(name))
        else:
            self._reply(308, b"", {"Range": f"bytes=0-{len(self.server.uploads[name]) - 1}"})

    def _store(self, bucket: str, name: str, data: bytes) -> None:
        self.server.objects[bucket, name] = data
        self._reply(200, self._resource(bucket, name))

    def _resource(self, bucket: str, name: str) -> dict[str, str]:
        data = self.server.objects[bucket, name]
        md5 = b64encode(hashlib.md5(data).digest()).decode()
        return {"name": name, "bucket": bucket, "size": str(len(data)), "md5Hash": md5}

    def _address(self) -> tuple[str, str | None, dict[str, list[str]]]:
        url = urlsplit(self.path)
        _, _, after = url.path.partition("/b/")
        bucket, _, rest = after.partition("/o")
        return bucket, unquote(rest.removeprefix("/")) or None, parse_qs(url.query)

    def _refused(self, bucket: str) -> bool:
        if bucket in self.server.forbidden:
            self._reply(403, {"error": {"code": 403, "message": "caller has no access"}})
        elif bucket not in self.server.buckets:
            self._reply(404, {"error": {"code": 404, "message": "The specified bucket does not exist."}})
        else:
            return False
        return True

    def _reply(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data)
