"""Places with a fault-injecting proxy in front, and the runs to disturb there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.eagle_process import EagleProcesses
from tests.faults.proxy import Proxy, running_proxy
from tests.faults.runs import STAGES, Place, Runs, comparable, contents
from tests.gcs.server import GcsServer
from tests.tiny import write_jsonl

_numbers = itertools.count()


@pytest.fixture(scope="session")
def running(gcs_server: GcsServer) -> Iterator[Proxy]:
    with running_proxy(gcs_server.url) as proxy:
        yield proxy


@pytest.fixture
def proxy(running: Proxy) -> Iterator[Proxy]:
    """The proxy without faults."""
    running.heal()
    yield running
    running.heal()


@pytest.fixture(scope="session")
def runs(
    eagle: EagleProcesses, gcs_server: GcsServer, tiny_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    folder = tmp_path_factory.mktemp("undisturbed")
    topics = ("rivers", "bridges", "lamps", "clouds", "violins", "maps", "kites", "bread")
    rows = [{"turns": [f"Tell me about {topic}.", f"And {topic} at night?"]} for topic in topics]
    prompts = write_jsonl(folder / "prompts.jsonl", rows)
    made = Runs(eagle, tiny_path, str(prompts), str(folder / "gen-data"), str(folder / "extract-features"))
    for stage in STAGES:
        ended = eagle.run(*made.arguments(stage, str(folder / stage)))
        assert ended.code == 0, ended.err
        made.whole[stage] = comparable(contents(gcs_server, str(folder / stage)))
    return made


@pytest.fixture
def local(runs: Runs, gcs_server: GcsServer, proxy: Proxy, tmp_path: Path) -> Place:
    return Place(str(tmp_path / "runs"), runs, gcs_server, proxy, {"EAGLE_CACHE": str(tmp_path / "cache")})


@pytest.fixture
def gcs(runs: Runs, gcs_server: GcsServer, proxy: Proxy, tmp_path: Path) -> Place:
    env = {"EAGLE_CACHE": str(tmp_path / "cache"), "STORAGE_EMULATOR_HOST": proxy.url}
    return Place(f"gs://bucket/faults-{next(_numbers)}", runs, gcs_server, proxy, env)


@pytest.fixture(params=["local", "gcs"])
def place(request: pytest.FixtureRequest) -> Place:
    return request.getfixturevalue(request.param)
