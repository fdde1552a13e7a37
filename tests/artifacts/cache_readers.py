"""Processes that read more through one cache than fits into it, some of them killed in the middle.

Run as a program with a folder for the cache, it forks them and prints as JSON what they saw. It is a process
of its own so that it can fork without threads in the way; what they read is in its memory, and so in theirs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from stages.artifacts import Artifact, ArtifactWriter, open_artifact
from tests.artifacts.races import ended, forked

FILES, FILE_BYTES, READERS, READS = 12, 200_000, 4, 60
LIMIT_BYTES = 4 * FILE_BYTES


def main(folder: Path) -> dict[str, object]:
    os.environ |= {"EAGLE_CACHE": str(folder), "EAGLE_CACHE_GB": str(LIMIT_BYTES / 1e9)}
    with ArtifactWriter.open("memory://source", "features", {}) as writer:
        for number in range(FILES):
            writer.add_shard(f"{number}.bin", bytes([number]) * FILE_BYTES, rows=1)
        writer.finish({})
    artifact = open_artifact("memory://source", "features")
    victims = [forked(lambda seed=seed: _read(artifact, seed, 10**6)) for seed in range(3)]  # type: ignore[misc]
    readers = [forked(lambda seed=seed: _read(artifact, seed, READS)) for seed in range(3, 3 + READERS)]  # type: ignore[misc]
    for victim in victims:
        time.sleep(0.1)
        os.kill(victim[0], signal.SIGKILL)
    wrong = [ended(child) for child in [*victims, *readers]]
    _read(artifact, 99, 1)  # makes room for itself, also where the killed ones left something
    left = sum(path.stat().st_size for path in (folder / "artifacts/files").iterdir())
    return {"wrong": wrong, "left": left, "limit": LIMIT_BYTES}


def _read(artifact: Artifact, seed: int, reads: int) -> None:
    draw = random.Random(seed)
    for _ in range(reads):
        number = draw.randrange(FILES)
        with artifact.pinned(artifact.manifest.shards[number].path) as path:
            time.sleep(draw.choice([0, 0.005]))
            data = path.read_bytes()
        if data != bytes([number]) * FILE_BYTES:
            raise AssertionError(f"file {number} is {data[:10]!r}... of {len(data)} bytes")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))))
