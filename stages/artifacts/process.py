"""A process that writes an artifact, and whether it still runs."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Process(BaseModel):
    """Precise enough to see later, on the same machine, whether it still runs.

    Attributes:
        host: the machine's name, for messages.
        space: what process numbers are unique in: the machine's boot and the container. "" where unknown.
        started: when the process began, in the machine's own ticks. "" where unknown.
        token: random, different for every writer, also within one process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    space: str
    pid: int
    started: str
    token: str

    @classmethod
    def this(cls) -> Process:
        """The running process, with a new token."""
        pid = os.getpid()
        host, space = this_machine()
        return cls(host=host, space=space, pid=pid, started=_started(pid), token=secrets.token_hex(8))

    def runs(self) -> bool | None:
        """Whether it still runs; None where that cannot be seen from here, as for another machine's."""
        if not self.space or (self.host, self.space) != this_machine():
            return None
        return _started(self.pid) == self.started

    def is_this(self) -> bool:
        """Whether it is the running process itself."""
        return bool(self.runs()) and self.pid == os.getpid()

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def this_machine() -> tuple[str, str]:
    """The name of this machine, and what its process numbers are unique in, "" where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return socket.gethostname(), f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname(), ""


def _started(pid: int) -> str:
    """Start tick of a process of this machine; "" where it has ended or there is no /proc."""
    try:
        # The name in field 2 may hold spaces and brackets, so count from its last bracket: state is field 3.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
