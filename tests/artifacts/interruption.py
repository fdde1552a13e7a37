"""Kills runs that write a local artifact with SIGKILL, at each system call that changes it, and reruns them.

Run as a program with a folder to work in, it prints as JSON how many kills each scenario took. It is a
process of its own so that it can fork a child for each kill without threads in the way.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from stages.artifacts import ArtifactWriter
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


def main(folder: Path) -> dict[str, int]:
    os.fsync = lambda descriptor: None  # a killed process loses nothing that the system has
    make(str(folder / "whole"), folder)
    whole = contents(str(folder / "whole"), without_created=True)
    return {start: _kill_everywhere(folder, start, whole) for start in ("empty", "finished", "unfinished")}


def _kill_everywhere(folder: Path, start: str, whole: dict[str, bytes]) -> int:
    kill_at = 0
    while True:
        kill_at += 1
        place = folder / f"{start}-{kill_at}"
        uri = str(place)
        if start != "empty":
            make(uri, folder, seed=1, finish=start == "finished")
        before = contents(uri)
        child = os.fork()
        if child == 0:
            _kill_at(kill_at, uri)
            make(uri, folder, overwrite=start != "empty")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return kill_at - 1
        assert os.WIFSIGNALED(status), f"the child failed at {kill_at}: {status}"
        make_again(uri, folder, before)
        assert contents(uri, without_created=True) == whole, f"{start}, killed at {kill_at}"
        folders = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_dir()}
        assert folders == {"state"}, f"{start}, killed at {kill_at}: {folders}"


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
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))))
