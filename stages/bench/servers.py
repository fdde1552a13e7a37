"""The servers of a run: those that others started, and those that bench starts and stops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from stages.bench.config import BenchConfig
from stages.bench.contestant import Contestant
from stages.bench.endpoint import Endpoint
from stages.bench.launch import LaunchLine, launch_all
from stages.bench.launch.command import Model, command_of
from stages.bench.line_up import LineUp
from stages.bench.result import title
from stages.bench.workload import Job, longest_prompt
from stages.errors import EagleError
from stages.progress import Reporter


def require_servers(config: BenchConfig) -> None:
    """Before anything is loaded or written.

    Raises:
        EagleError: an endpoint is not there, or a server cannot be started here.
    """
    endpoints(config)
    for line in _launch_lines(config):
        command_of(line, _served(config, longest=config.answer_lengths[-1]), port=0)


def endpoints(config: BenchConfig) -> list[Endpoint]:
    """The servers of `--endpoint`, each asked for its model."""
    named = (each.partition("=") for each in config.endpoint)
    return [Endpoint(name, url, config.timeout) for name, _, url in named]


@contextmanager
def launched(config: BenchConfig, jobs: Sequence[Job], report: Reporter) -> Iterator[list[Contestant]]:
    """The servers of `--launch`."""
    if not config.launch:
        yield []
        return
    model = _served(config, longest=longest_prompt(jobs, config.target) + config.answer_lengths[-1])
    with launch_all(_launch_lines(config), model, report, config.timeout) as servers:
        yield list(servers)


def _launch_lines(config: BenchConfig) -> list[LaunchLine]:
    return [LaunchLine.parse(line, config.head) for line in config.launch]


def _served(config: BenchConfig, *, longest: int) -> Model:
    """What the servers of `--launch` serve."""
    return Model(
        config.target,
        longest,
        max(config.levels),
        config.device,
        "bfloat16" if config.dtype == "auto" else config.dtype,
        config.chat_template,
        config.verify,
    )


def require_own_names(config: BenchConfig, line_up: LineUp) -> None:
    """Raises EagleError: a server has the name of an engine of this process, and would be added to it."""
    taken = {title(each.name) for each in line_up.contestants()}
    for given in (*config.endpoint, *config.launch):
        name = given.partition("=")[0]
        if title(name) in taken:
            raise EagleError(
                f"a server is called {name}, as is what bench measures itself: give it another name"
            )
