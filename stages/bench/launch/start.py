"""Starting all servers of a run, one after the other, and stopping them."""

from __future__ import annotations

import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from stages.bench.endpoint import PATIENCE_SECONDS
from stages.bench.launch.command import Model, command_of
from stages.bench.launch.launched import Launched
from stages.bench.launch.line import LaunchLine
from stages.progress import Reporter


@contextmanager
def launch_all(
    lines: Sequence[LaunchLine], model: Model, report: Reporter, patience: float = PATIENCE_SECONDS
) -> Iterator[list[Launched]]:
    """The servers, healthy and asleep; they are stopped when the block ends, whatever ends it.

    Their logs are kept where something went wrong, in the folder that the error names.

    Args:
        patience: seconds without a token after which an answer counts as hung.

    Raises:
        EagleError: one cannot be started.
    """
    folder = Path(tempfile.mkdtemp(prefix="eagle-servers-"))
    commands = [(line, port, command_of(line, model, port)) for line in lines for port in [_free_port()]]
    with ExitStack() as stack:
        servers = []
        with report.task("servers", total=len(lines)) as task:
            for line, port, command in commands:
                task.note(f"{line.name} is starting")
                log = folder / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', line.name)}.log"
                server = Launched(line.name, command, port, log)
                stack.callback(server.close)
                server.wait(line.wait, patience)
                with server.turn():
                    pass  # asleep from here on
                servers.append(server)
                task.advance()
        yield servers
    shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
