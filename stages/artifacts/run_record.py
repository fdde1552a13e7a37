"""What an unfinished artifact remembers: who is writing it, from what, and what is committed so far."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.artifacts.folder import Folder
from stages.artifacts.manifest import SCHEMA_VERSION, Kind, Parent, Shard, TargetFingerprint, canonical_json
from stages.artifacts.uri import join
from stages.errors import EagleError

RUN_NAME = "_run.json"
FILES_NAME = "_records/files.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Process(_Record):
    """A process that writes, precise enough to see later whether it still runs.

    Attributes:
        started: boot and start time of the process where the system tells them, else "".
        token: random, different for every writer, also within one process.
    """

    host: str
    pid: int
    started: str
    token: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process of this host, with a new token."""
        return cls(host=socket.gethostname(), pid=pid, started=_started(pid), token=secrets.token_hex(8))

    def is_other_and_alive(self) -> bool:
        """Whether this is another process of this host that still runs; other hosts' count as dead."""
        if self.host != socket.gethostname() or self.pid == os.getpid():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _started(self.pid) == self.started


class RunRecord(_Record):
    """`_run.json`: what an artifact is being made from, and by whom; there from first to last.

    Attributes:
        process: who writes; None once it has stopped of itself without finishing.
        clearing: the files of a replaced artifact that are still to be removed; None once they are gone.
            While it is not None, the records beside this one belong to the replaced artifact.
    """

    kind: Kind
    schema_version: int = SCHEMA_VERSION
    config: dict[str, Any]
    parents: tuple[Parent, ...]
    target: TargetFingerprint | None
    process: Process | None
    clearing: tuple[str, ...] | None = None

    def write(self, folder: Folder) -> None:
        folder.write(RUN_NAME, _json(self))


class ShardRecord(_Record):
    """`_records/<n>.json`: the n-th committed shard, with what its stage wants to know when it continues."""

    shard: Shard
    note: dict[str, Any]


class FileRecords(_Record):
    """`_records/files.json`: the files beside the shards.

    Attributes:
        pending: the file whose writing began last. It may be there as described, or not, or in its version in
            `files`.
    """

    files: tuple[Shard, ...] = ()
    pending: Shard | None = None

    def write(self, folder: Folder) -> None:
        folder.write(FILES_NAME, _json(self))


def read_run(folder: Folder) -> RunRecord | None:
    """The run record of an unfinished artifact, or None.

    Raises:
        EagleError: there is a file of that name that is none.
    """
    data = folder.read(RUN_NAME)
    if data is None:
        return None
    try:
        return RunRecord.model_validate_json(data)
    except ValidationError:
        raise EagleError(
            f"{join(folder.uri, RUN_NAME)} is not a run record of this eagle: choose another output, "
            "or remove the folder"
        ) from None


def read_shard_records(folder: Folder) -> list[ShardRecord]:
    """The records numbered 0, 1, 2, ... up to the first that is missing or unreadable."""
    records: list[ShardRecord] = []
    while (data := folder.read(_shard_record_name(len(records)))) is not None:
        try:
            records.append(ShardRecord.model_validate_json(data))
        except ValidationError:
            break
    return records


def write_shard_record(folder: Folder, number: int, record: ShardRecord) -> None:
    folder.write(_shard_record_name(number), _json(record))


def read_file_records(folder: Folder) -> FileRecords:
    """The records of files beside the shards; none when there is no record or it is unreadable."""
    data = folder.read(FILES_NAME)
    if data is None:
        return FileRecords()
    try:
        return FileRecords.model_validate_json(data)
    except ValidationError:
        return FileRecords()


def remove_shard_records(folder: Folder, first: int = 0) -> None:
    """Removes the records from number `first` on, the last one first, so that those left have no gap."""
    end = first
    while folder.size(_shard_record_name(end)) is not None:
        end += 1
    for number in range(end, first, -1):
        folder.remove(_shard_record_name(number - 1))


def remove_records(folder: Folder) -> None:
    """Removes all records but the run record."""
    remove_shard_records(folder)
    folder.remove(FILES_NAME)


def _shard_record_name(number: int) -> str:
    return f"_records/{number}.json"


def _json(record: BaseModel) -> bytes:
    return canonical_json(record.model_dump(mode="json")) + b"\n"


def _started(pid: int) -> str:
    """Boot id and start tick of a process, "dead" once it has ended; "" where the system has no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    try:
        # The name in field 2 may hold spaces and brackets, so count from its last bracket: state is field 3.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "dead"
    return "dead" if fields[0] in "ZX" else f"{boot}:{fields[19]}"
