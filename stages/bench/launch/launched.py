"""A server of this machine in a process group of its own, asleep while others have the machine."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from stages.bench.endpoint import PATIENCE_SECONDS, Endpoint
from stages.bench.launch.command import Command
from stages.bench.memory import group_members, group_peak
from stages.bench.record import Turn
from stages.bench.workload import Job
from stages.decoding import SamplingParams
from stages.errors import EagleError

_SECONDS_TO_STOP = 30.0
_SECONDS_TO_END = 1.0
"""From when a connection breaks: a server that has crashed may take a moment."""
_LOOK_EVERY = 0.2


class Launched:
    """Starts a server, waits until it is healthy, and is then measured as an endpoint. Close it.

    Between its turns the process group is stopped (SIGSTOP), so that an idle server that spins takes nothing
    from whoever is measured.

    Attributes:
        name: of the contestant.
        log: what the server has written.
    """

    def __init__(self, name: str, command: Command, port: int, log: Path) -> None:
        """Raises EagleError: it cannot be started."""
        self.name, self.log = name, log
        self._port = port
        self._endpoint: Endpoint | None = None
        try:
            with log.open("wb") as file:
                self._process = subprocess.Popen(
                    command.words,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=command.environment(),
                    start_new_session=True,
                )
        except OSError as error:
            raise EagleError(
                f"server {name} cannot be started: {command.words[0]}: {error.strerror}"
            ) from None
        self._warden = warden(self._process.pid)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def model(self) -> str:
        """The name under which it serves its model."""
        return self._asked().model

    def wait(self, seconds: float, patience: float = PATIENCE_SECONDS) -> None:
        """Until it answers at /health.

        Args:
            patience: seconds without a token after which an answer counts as hung.

        Raises:
            EagleError: it ends before, or takes longer.
        """
        end = time.monotonic() + seconds
        while not self._healthy():
            if (code := self._process.poll()) is not None:
                raise EagleError(f"server {self.name} ended with exit code {code}{self._last_words()}")
            if time.monotonic() > end:
                raise EagleError(
                    f"server {self.name} is not ready after {seconds:g} s (wait=SECONDS gives it longer)"
                    f"{self._last_words()}"
                )
            time.sleep(_LOOK_EVERY)
        self._endpoint = Endpoint(self.name, self.url, patience)

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def warm_up(self, job: Job, concurrency: int, params: SamplingParams) -> None:
        with self._explained():
            self._asked().warm_up(job, concurrency, params)

    def answer(
        self,
        jobs: Sequence[tuple[int, Job]],
        concurrency: int,
        params: SamplingParams,
        due: Sequence[float] | None = None,
    ) -> Turn:
        with self._explained():
            turn = self._asked().answer(jobs, concurrency, params, due)
        return turn.model_copy(update={"peak_memory": group_peak(self._process.pid)})

    def close(self) -> None:
        """Ends the whole group: asks, waits, and kills what is left. Again is nothing."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        end = time.monotonic() + _SECONDS_TO_STOP
        while time.monotonic() < end and (self._process.poll() is None or group_members(self._process.pid)):
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._warden.returncode is None:
            self._warden.communicate(b"\n")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # none of the group is left
            os.killpg(self._process.pid, number)

    def _asked(self) -> Endpoint:
        assert self._endpoint is not None, "wait() first"
        return self._endpoint

    def _healthy(self) -> bool:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)) as connection:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """An error of a server that has ended says so, and where its log is."""
        try:
            yield
        except EagleError as error:
            try:
                code = self._process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                raise error from None
            raise EagleError(
                f"server {self.name} ended while it was measured, with exit code {code}{self._last_words()}"
            ) from error

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        said = next((" ".join(line.split())[:200] for line in reversed(lines) if line.strip()), "nothing")
        return f"; its log {self.log} ends: {said}"


def warden(group: int) -> subprocess.Popen[bytes]:
    """Kills a process group when this process ends, whatever ends it, asleep as the group may be.

    It waits for a line, which says that all is well; when the pipe ends without one, nobody is left to write.
    """
    script = "read -r line || kill -s KILL -- -$0"
    return subprocess.Popen(
        ["/bin/sh", "-c", script, str(group)], stdin=subprocess.PIPE, start_new_session=True
    )
