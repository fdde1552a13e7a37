"""`eagle` in processes of their own that start at once, so that many can be killed.

`EagleProcesses` starts a program, this module, that imports what the stages import and then forks a child for
each command. The child is a process like any other `eagle`: it runs `eagle_cli.main.main`, writes to its own
stdout and stderr, and ends through the interpreter's own end. Only the seconds of importing are saved.

The program lives in a mount namespace of its own where the system allows one, so that it can mount small
disks.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_cli import environment

_IMPORTED_BEFOREHAND = (
    "gcsfs.core",
    "google.auth.compute_engine",
    "pandas",
    "presidio_analyzer",
    "pyarrow.dataset",
    "stages.bench.stage",
    "stages.decoding",
    "stages.extract_features.stage",
    "stages.gen_data.stage",
    "stages.serve.stage",
    "stages.train.stage",
    "transformers.models.llama.modeling_llama",
)
_NEW_NAME = 0x04000000  # CLONE_NEWUTS
_PRIVATE_MOUNTS = ["unshare", "--mount", "--propagation", "private"]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, or the negative number of the signal that killed it."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def error(self) -> str:
        """The one line that a command which failed said last; there is no traceback and no other warning."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert self.code == 1, f"exit code {self.code}: {self.err[-3000:]}"
        assert "Traceback" not in self.err, self.err[-3000:]
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:], self.err[-3000:]
        return lines[-1].removeprefix("error: ")

    @property
    def result(self) -> dict[str, Any]:
        """The object that a command with --json printed."""
        assert self.code == 0, f"exit code {self.code}: {self.err[-3000:]}"
        return json.loads(self.out)


class EagleProcess:
    """A command that runs."""

    def __init__(self, processes: EagleProcesses, pid: int, out: Path, err: Path) -> None:
        self.pid = pid
        self._processes = processes
        self._out, self._err = out, err
        self._started = time.monotonic()
        self._ended: Ended | None = None

    def running(self) -> bool:
        if self._ended is None:
            code = self._processes.ask(poll=self.pid)["code"]
            if code is not None:
                seconds = time.monotonic() - self._started
                out, err = self._out.read_text(errors="replace"), self._err.read_text(errors="replace")
                self._ended = Ended(code, out, err, seconds)
        return self._ended is None

    def err(self) -> str:
        """What it has written to stderr so far."""
        return self._err.read_text(errors="replace")

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.running():
                os.kill(self.pid, number)

    def wait(self, seconds: float = 60.0) -> Ended:
        end = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > end:
                self.signal(signal.SIGKILL)
                raise AssertionError(f"still running after {seconds} s: {self.err()[-3000:]}")
            time.sleep(0.01)
        assert self._ended is not None
        return self._ended

    def kill(self) -> Ended:
        """Kills it, as `kill -9` does, if it still runs."""
        self.signal(signal.SIGKILL)
        return self.wait(10)


class EagleProcesses:
    """Starts commands. Get one from `eagle_processes`.

    Attributes:
        namespaces: whether they can have disks and a machine's name of their own.
    """

    def __init__(self, program: subprocess.Popen[str], folder: Path, namespaces: bool) -> None:
        self.namespaces = namespaces
        self._program = program
        self._folder = folder
        self._number = 0

    def start(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        host: str = "",
        file_limit: int | None = None,
    ) -> EagleProcess:
        """Starts `eagle` with `arguments`.

        Args:
            env: variables to set, over those of the tests.
            host: name of the machine it is to believe it is on.
            file_limit: largest file it may write, in bytes.
        """
        self._number += 1
        out, err = self._folder / f"{self._number}.out", self._folder / f"{self._number}.err"
        err.touch()
        started = self.ask(
            start=list(arguments),
            env=dict(env or {}),
            out=str(out),
            err=str(err),
            host=host,
            file_limit=file_limit,
        )
        return EagleProcess(self, started["pid"], out, err)

    def run(self, *arguments: str, env: Mapping[str, str] | None = None, seconds: float = 60.0) -> Ended:
        return self.start(*arguments, env=env).wait(seconds)

    def mount(self, folder: Path, size: int) -> Path:
        """Makes `folder` a disk of `size` bytes for the processes, or resizes it; where the tests see it."""
        self.ask(mount=str(folder), size=size)
        return Path(f"/proc/{self._program.pid}/root{folder}")

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(request) + "\n")
        self._program.stdin.flush()
        answer = json.loads(self._program.stdout.readline())
        if "failed" in answer:
            raise OSError(answer["failed"])
        return answer


@contextmanager
def eagle_processes(folder: Path) -> Iterator[EagleProcesses]:
    """The program is started, and ended with all that it started; `folder` is for the outputs."""
    command = [sys.executable, "-m", "tests.faults.eagle_process"]
    private = _may_unshare()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    program = subprocess.Popen(
        [*_PRIVATE_MOUNTS, *command] if private else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert program.stdout is not None
        assert json.loads(program.stdout.readline()) == {"ready": True}
        yield EagleProcesses(program, folder, private)
    finally:
        program.communicate(timeout=20)  # the end of its input ends it


def _may_unshare() -> bool:
    with suppress(OSError, subprocess.CalledProcessError):
        subprocess.run([*_PRIVATE_MOUNTS, "true"], check=True, capture_output=True)
        return True
    return False


def serve_requests() -> int | None:
    """Answers requests until their end; in a child it returns the exit code of its command."""
    environment.prepare(quiet=True)  # before the imports, as `eagle` does
    for module in _IMPORTED_BEFOREHAND:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # or each child would copy every page when it ends

    children: dict[int, int | None] = {}
    answer: dict[str, Any] = {"ready": True}
    while True:
        os.write(1, json.dumps(answer).encode() + b"\n")
        line = _line()
        if not line:
            for pid, code in children.items():
                if code is None:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            return None
        request = json.loads(line)
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                return _command(request)
            children[pid] = None
            answer = {"pid": pid}
        elif "poll" in request:
            pid = request["poll"]
            if children[pid] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    children[pid] = os.waitstatus_to_exitcode(status)
            answer = {"code": children[pid]}
        else:
            answer = _mount(request["mount"], request["size"])


def _line() -> bytes:
    """A line of stdin, read without a buffer that a child would inherit."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return b""
        line += byte
    return bytes(line)


def _command(request: dict[str, Any]) -> int:
    for number, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC if number else os.O_RDONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(request["env"])
    if request["host"]:
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NAME):
            raise OSError(ctypes.get_errno(), "no namespace for a name of its own")
        socket.sethostname(request["host"])
    if request["file_limit"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], request["file_limit"]))
    from eagle_cli.main import main

    return main(request["start"])


def _mount(folder: str, size: int) -> dict[str, Any]:
    change = "remount," if os.path.ismount(folder) else ""
    command = ["mount", "-t", "tmpfs", "-o", f"{change}size={size}", "tmpfs", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    return {} if done.returncode == 0 else {"failed": done.stderr}


if __name__ == "__main__":
    sys.exit(serve_requests())
