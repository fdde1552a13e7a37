"""Processes on pretended machines that write the same local artifact at once.

Run as a program with a folder to work in, it forks them and prints as JSON how each ended. It is a process of
its own so that it can fork without threads in the way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.artifacts import ArtifactWriter, claims, open_artifact, process
from stages.errors import EagleError

BEAT_S, WATCH_S = 0.1, 1.0
LONG_S = 10.0
SHARDS = 3


def make(
    uri: str, machine: str, *, pause: Callable[[int], object] = lambda number: None, watch_s: float = WATCH_S
) -> None:
    """The artifact, made on a machine of that name; `pause` is called before each shard."""
    process.this_machine = lambda: (machine, f"boot of {machine}")
    claims.BEAT_S, claims.WATCH_S, claims._LOOK_S = BEAT_S, watch_s, BEAT_S
    with ArtifactWriter.open(uri, "features", {"seed": 0}) as writer:
        if writer.finished is not None:
            return
        for number in range(len(writer.committed), SHARDS):
            pause(number)
            writer.add_shard(f"{number}.bin", b"shard %d" % number, rows=1, note={"by": machine})
        writer.finish({"rows": SHARDS})


def forked(work: Callable[[], object]) -> tuple[int, int]:
    """Runs it in a child; its process number, and a descriptor for what it is refused with, if anything."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    os.close(read)
    line = ""
    try:
        work()
    except EagleError as error:
        line = str(error)
    except BaseException as error:
        line = f"BUG {error!r}"
    os.write(write, line.encode())
    os._exit(0)


def ended(child: tuple[int, int]) -> str:
    """What a child was refused with, "" for one that did what it was to do."""
    with os.fdopen(child[1], "rb") as answer:
        line = answer.read().decode()
    os.waitpid(child[0], 0)
    return line


def take_over_at_once(folder: Path, dead: str, machines: list[str], rounds: int) -> list[list[str]]:
    """Runs continue, all at one moment, what one on the machine `dead` was killed at.

    Returns:
        of each round: what each run was refused with, and then what is wrong with the artifact.
    """
    uris = [str(folder / str(number)) for number in range(rounds)]
    children = []
    for uri in uris:
        _killed_at_shard(uri, dead, 1)
        begin = time.monotonic() + 0.05
        children.append([forked(lambda m=m, u=uri, b=begin: _make_at(b, u, m)) for m in machines])  # type: ignore[misc]
    answers = [[ended(child) for child in of_round] for of_round in children]
    return [[*of_round, *faults(uri)] for of_round, uri in zip(answers, uris, strict=True)]


def _make_at(begin: float, uri: str, machine: str) -> None:
    while time.monotonic() < begin:
        pass
    make(uri, machine, pause=lambda number: time.sleep(WATCH_S))


def faults(uri: str) -> list[str]:
    """What is wrong with the artifact that `make` makes."""
    artifact = open_artifact(uri, "features")
    wrong = [error for _, error in artifact.verify_all() if error is not None]
    if [artifact.read(shard.path) for shard in artifact.manifest.shards] != [
        b"shard 0",
        b"shard 1",
        b"shard 2",
    ]:
        wrong.append("other shards")
    there = {path.name for path in Path(uri).iterdir()}
    wanted = {"manifest.json", *(shard.path for shard in artifact.manifest.shards)}
    return wrong if there == wanted else [*wrong, f"{there} is there and not {wanted}"]


def wake_after_takeover(folder: Path) -> list[str]:
    """A run is stopped before its second shard, another machine's takes over, and the first one wakes up.

    Returns:
        what the second and the first were refused with, and then what is wrong with the artifact.
    """
    uri = str(folder / "zombie")
    seen = folder / "seen"

    def stop(number: int) -> None:
        if number == 1:
            seen.write_text("")
            os.kill(os.getpid(), signal.SIGSTOP)

    first = forked(lambda: make(uri, "first", pause=stop))
    _wait_for(seen)
    second = ended(forked(lambda: make(uri, "second")))
    os.kill(first[0], signal.SIGCONT)
    return [second, ended(first), *faults(uri)]


def living_is_left_alone(folder: Path, machine: str, hours: int) -> str:
    """What a run is refused with whose clock is hours wrong, while one on the machine "first" writes."""
    uri = str(folder / f"living-{machine}-{hours}")
    go, seen = folder / f"go-{machine}-{hours}", folder / f"seen-{machine}-{hours}"

    def wait(number: int) -> None:
        seen.write_text("")
        _wait_for(go)

    first = forked(lambda: make(uri, "first", pause=wait))
    _wait_for(seen)
    second = forked(lambda: _in_another_time(hours, lambda: make(uri, machine, watch_s=LONG_S)))
    refused = ended(second)
    go.write_text("")
    assert ended(first) == ""
    assert not faults(uri)
    return refused


def _in_another_time(hours: int, work: Callable[[], object]) -> None:
    now = time.time
    time.time = lambda: now() + 3600 * hours
    work()


def _killed_at_shard(uri: str, machine: str, number: int) -> None:
    def kill(at: int) -> None:
        if at == number:
            os.kill(os.getpid(), signal.SIGKILL)

    ended(forked(lambda: make(uri, machine, pause=kill)))


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.01)


def main(folder: Path) -> dict[str, Any]:
    os.fsync = lambda descriptor: None
    return {
        "one machine": take_over_at_once(folder / "one", "x", ["x"] * 4, 10),
        "machines": take_over_at_once(folder / "many", "dead", ["x", "y", "z"], 10),
        "woken": wake_after_takeover(folder),
        "living": [
            living_is_left_alone(folder, machine, hours)
            for machine, hours in [("first", 0), ("second", 0), ("second", 9), ("second", -9)]
        ],
    }


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(main(Path(sys.argv[1]))))
