"""What an unfinished artifact holds so far, and who writes it; nothing is changed by looking."""

from __future__ import annotations

from dataclasses import dataclass

from stages.artifacts.claims import last_claim, parse_claim
from stages.artifacts.folder import open_folder
from stages.artifacts.manifest import MANIFEST_NAME, Shard
from stages.artifacts.process import Process
from stages.artifacts.records import read_records
from stages.artifacts.run_record import RunRecord, read_run


@dataclass(frozen=True)
class Unfinished:
    """An artifact that was begun.

    Attributes:
        run: what it is made from; `run.parts` is the number of parts of a job array, else None.
        shards: what is committed; empty while an artifact that was here before is being removed, and for the
            whole of a job array, whose parts have theirs.
        files: what is beside the shards.
        writer: who writes it or was killed at it (`writer.runs()` tells which, where that can be seen); None
            once it has stopped in an orderly way.
    """

    run: RunRecord
    shards: tuple[Shard, ...]
    files: tuple[Shard, ...]
    writer: Process | None


def unfinished(uri: str) -> Unfinished | None:
    """The unfinished artifact at `uri`, None where there is none or it is finished.

    Raises:
        EagleError: storage fails, or what is there is of a later version of eagle.
    """
    folder = open_folder(uri)
    run = read_run(folder)
    if run is None or folder.size(MANIFEST_NAME) is not None:
        return None
    last = last_claim(folder, run.generation)
    if last is None:
        return Unfinished(run, (), (), None)
    claim = parse_claim(last[1])
    writer = None if claim is None or claim.ended else claim.process
    if run.clearing is not None:
        return Unfinished(run, (), (), writer)
    recorded = read_records(folder, run.generation, last[0])
    return Unfinished(run, tuple(record.shard for _, record in recorded.shards), recorded.state.files, writer)
