"""Records kept as they are made: JSON-lines shards of the report, from which a killed run continues."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

from stages.artifacts import ArtifactWriter
from stages.bench.record import Record
from stages.errors import EagleError

COMMIT_SECONDS = 20.0

R = TypeVar("R", bound=Record)


class Journal(Generic[R]):
    """The records of one phase of the run, in order, in shards `<name>-00000.jsonl` and so on.

    Leaving the context commits them, also when something went wrong.

    Attributes:
        records: those of earlier runs and those added since.
    """

    def __init__(self, writer: ArtifactWriter, name: str, kind: type[R]) -> None:
        self._writer, self._name = writer, name
        paths = [done.shard.path for done in writer.committed if done.shard.path.startswith(f"{name}-")]
        self._shards = len(paths)
        self.records = [
            kind.model_validate_json(line)
            for path in paths
            for line in writer.local(path).read_bytes().splitlines()
        ]
        self._committed = len(self.records)
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.commit()
            return
        with suppress(EagleError):  # what went wrong first is what is told
            self.commit()

    def add(self, record: R) -> None:
        """Takes a record; every `COMMIT_SECONDS` or so those since the last time become a shard."""
        self.records.append(record)
        if time.monotonic() - self._last >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Makes the records since the last shard the next one, if there are any."""
        new = self.records[self._committed :]
        if new:
            data = b"".join(record.model_dump_json().encode() + b"\n" for record in new)
            self._writer.add_shard(f"{self._name}-{self._shards:05d}.jsonl", data, rows=len(new))
            self._shards += 1
            self._committed += len(new)
        self._last = time.monotonic()
