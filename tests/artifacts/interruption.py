"""Kills runs that write a local artifact with SIGKILL, at each system call that changes it, and reruns them.

Run as a program with a folder to work in and what is there when a run starts, it prints how many kills it
took. It is a process of its own so that it can fork a child for each kill without threads in the way.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from stages.artifacts import ArtifactWriter, merge_parts
from stages.artifacts.uri import filesystem
from stages.errors import EagleError

CONFIG = {"seed": 0}
_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def make(uri: str, scratch: Path, *, seed: int = 0, overwrite: bool = False, finish: bool = True) -> None:
    """A small artifact of shards and files, one of them replaced on the way, continued if it was begun."""
    source = scratch / f"source-{seed}.bin"
    source.write_bytes(b"%d" % seed * 1000)
    with ArtifactWriter.open(uri, "features", {"seed": seed}, overwrite=overwrite) as writer:
        if writer.finished:
            return
        if writer.committed:  # what a stage would continue from is there, in one whole version
            assert writer.local("state/now.bin").read_bytes().endswith(b" of %d" % seed)
        for number in range(len(writer.committed), 3):
            assert [done.note["number"] for done in writer.committed] == list(range(number))
            writer.add_file("state/now.bin", b"state %d of %d" % (number, seed))
            data = source if number == 1 else b"shard %d of %d" % (number, seed)
            writer.add_shard(f"part-{number}.bin", data, rows=number, note={"number": number})
        writer.add_file("state/now.bin", b"state - of %d" % seed)
        writer.add_file("only-here.json" if seed else "config.json", b"{}")
        writer.add_file("scratch.bin", b"needed until the end")
        if finish:
            writer.finish({"rows": 3}, drop=["scratch.bin"])


def make_nothing(uri: str) -> None:
    pass


def make_part(uri: str, number: int, *, seed: int = 0, overwrite: bool = False) -> None:
    """A part of two, of one shard and one file."""
    with ArtifactWriter.open(
        uri, "features", {"seed": seed}, part=(number, 2), overwrite=overwrite
    ) as writer:
        if writer.finished is None:
            if not writer.committed:
                writer.add_shard("part.bin", b"part %d of %d" % (number, seed), rows=1)
            writer.add_file("target/config.json", b"{}")
            writer.finish({"rows": 1})


def merge(uri: str, *, seed: int = 0) -> None:
    merge_parts(uri, "features", {"seed": seed}, [], None, 2, lambda counts: {"rows": len(counts)})


def make_parts(uri: str, *, seed: int = 0) -> None:
    for number in range(2):
        make_part(uri, number, seed=seed)


def make_merged(uri: str, *, seed: int = 0) -> None:
    make_parts(uri, seed=seed)
    merge(uri, seed=seed)


def make_parts_again(uri: str, before: dict[str, bytes]) -> None:
    """The killed command for part 0 again, with --overwrite only if nothing has changed; then the rest."""
    try:
        make_part(uri, 0)
    except EagleError:
        assert {name: contents(uri).get(name) for name in before} == before
        make_part(uri, 0, overwrite=True)
    make_part(uri, 1)
    merge(uri)


def contents(uri: str, *, without_created: bool = False) -> dict[str, bytes]:
    """Every file below a URI, by relative path."""
    fs, root = filesystem(uri)
    fs.invalidate_cache()
    found = {path.removeprefix(root).strip("/"): fs.cat_file(path) for path in fs.find(root)}
    if without_created and "manifest.json" in found:
        manifest = json.loads(found["manifest.json"])
        del manifest["created"]
        found["manifest.json"] = json.dumps(manifest).encode()
    return found


def make_again(uri: str, scratch: Path, before: dict[str, bytes]) -> None:
    """The killed command again, without --overwrite unless the old artifact is still there, then whole."""
    try:
        make(uri, scratch)
    except EagleError:
        after = contents(uri)
        assert before, "refused what it had begun itself"
        assert {name: after.get(name) for name in before} == before
        make(uri, scratch, overwrite=True)


def main(folder: Path, start: str) -> int:
    """Kills what begins with `start` there; how many kills it took."""
    os.fsync = lambda descriptor: None  # a killed process loses nothing that the system has
    uris = (str(folder / str(number)) for number in itertools.count())
    whole = next(uris)
    if start in ("merging", "replacing parts"):
        make_merged(whole)
    else:
        make(whole, folder)
    wanted = contents(whole, without_created=True)
    match start:
        case "merging":
            return kill_everywhere(uris, make_parts, merge, lambda uri, before: merge(uri), wanted)
        case "replacing parts":
            begin, work = partial(make_merged, seed=1), partial(make_part, number=0, overwrite=True)
            return kill_everywhere(uris, begin, work, make_parts_again, wanted)
    begin = partial(make, scratch=folder, seed=1, finish=start == "finished")
    if start == "empty":
        begin = make_nothing
    work = partial(make, scratch=folder, overwrite=start != "empty")
    return kill_everywhere(uris, begin, work, lambda uri, before: make_again(uri, folder, before), wanted)


def kill_everywhere(
    uris: Iterator[str],
    begin: Callable[[str], object],
    work: Callable[[str], object],
    again: Callable[[str, dict[str, bytes]], object],
    whole: dict[str, bytes],
) -> int:
    """Kills `work` at each change, each time at another place, and sees what `again` makes of it.

    Args:
        begin: makes what is there before.
        whole: what has to be there afterwards.

    Returns:
        how many kills it took until `work` came to its end.
    """
    for kill_at, uri in enumerate(uris, start=1):
        begin(uri)
        before = contents(uri)
        child = os.fork()
        if child == 0:
            _kill_at(kill_at, uri)
            work(uri)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return kill_at - 1
        assert os.WIFSIGNALED(status), f"the child failed in {uri}: {status}"
        again(uri, before)
        assert contents(uri, without_created=True) == whole, uri
        empty = [path for path in Path(uri).rglob("*") if path.is_dir() and not any(path.iterdir())]
        assert not empty, f"{uri}: {empty}"
    raise AssertionError


def _flags(value: object) -> int:
    return value if isinstance(value, int) else 0


def _kill_at(number: int, uri: str) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        path = str(arguments[0]) if arguments else ""
        opened = event == "open" and _flags(arguments[2]) & (os.O_WRONLY | os.O_RDWR)
        if path.startswith(uri) and (opened or event in _CHANGES):
            if opened and not path.endswith(".eagle-tmp"):
                os._exit(3)  # a file was about to grow under its final name
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    sys.stdout.write(str(main(Path(sys.argv[1]), sys.argv[2])))
