"""What an unfinished artifact remembers: the shards and files that are committed so far.

The holder of a claim writes its records into its own folder, and begins by writing down, in `state.json`,
which records of the holders before it count. So what one of them records later, not knowing that it has been
taken over, is never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.artifacts.folder import Folder, measure
from stages.artifacts.manifest import Shard, canonical_json
from stages.artifacts.run_record import place_of

_READ_AT_ONCE = 32


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> bytes:
        return canonical_json(self.model_dump(mode="json")) + b"\n"


_R = TypeVar("_R", bound=_Record)


class ShardRecord(_Record):
    """`shard-<n>.json`: the n-th committed shard, with what its stage wants to know when it continues.

    As `begun-<n>.json`: the shard that is about to be written.
    """

    shard: Shard
    note: dict[str, Any]


class State(_Record):
    """`state.json`: what a holder began with, and the files beside the shards.

    Attributes:
        shards: (claim, how many of the shards recorded under it count), in order.
        files: those that are there.
        pending: the file whose writing began last. It may be there as described, or not, or in its version in
            `files`.
    """

    shards: tuple[tuple[int, int], ...] = ()
    files: tuple[Shard, ...] = ()
    pending: Shard | None = None

    @property
    def shards_before(self) -> int:
        return sum(count for _, count in self.shards)


class Records:
    """The records that the holder of one claim writes."""

    def __init__(self, folder: Folder, generation: str, number: int, state: State) -> None:
        self._folder = folder
        self._place = place_of(generation, number)
        self._state = state

    def begin_shard(self, number: int, record: ShardRecord) -> None:
        """Writes down what is about to be written, so that it is found if it is never committed."""
        self._folder.write(f"{self._place}/begun-{number}.json", record.to_json())

    def commit_shard(self, number: int, record: ShardRecord) -> None:
        self._folder.write(f"{self._place}/shard-{number}.json", record.to_json())

    def set_files(self, files: Iterable[Shard], pending: Shard | None) -> None:
        self._state = self._state.model_copy(update={"files": tuple(files), "pending": pending})
        self._folder.write(f"{self._place}/state.json", self._state.to_json())


@dataclass(frozen=True)
class Recorded:
    """What is recorded, whether or not it is still there.

    Attributes:
        shards: (claim it is recorded under, record), in order.
        begun: the shard that comes next, if its writing had begun.
        state: the files, as the last holder left them.
    """

    shards: list[tuple[int, ShardRecord]]
    begun: ShardRecord | None
    state: State

    @property
    def paths(self) -> list[str]:
        """Every file that the records name."""
        begun = [self.begun.shard] if self.begun else []
        pending = [self.state.pending] if self.state.pending else []
        shards = [record.shard for _, record in self.shards]
        return [entry.path for entry in (*shards, *begun, *self.state.files, *pending)]


def read_records(folder: Folder, generation: str, last: int) -> Recorded:
    """What counts of what the holders of claims up to `last` recorded."""
    for number in range(last, -1, -1):
        data = folder.read(f"{place_of(generation, number)}/state.json")
        if data is not None and (state := _parsed(State, data)) is not None:
            break
    else:
        return Recorded([], None, State())
    shards = list(_counted(folder, generation, state))
    if len(shards) < state.shards_before:
        return Recorded(shards, None, state)
    shards += ((number, record) for record in _own(folder, place_of(generation, number), len(shards)))
    begun = folder.read(f"{place_of(generation, number)}/begun-{len(shards)}.json")
    return Recorded(shards, _parsed(ShardRecord, begun), state)


def continue_records(
    folder: Folder, generation: str, number: int, *, unsure: bool
) -> tuple[list[ShardRecord], dict[str, Shard], Records]:
    """Begins the records of claim `number` with what is whole of what was committed before it.

    What is not is removed. Shards are cut at the first that is not whole, because a stage's notes build on
    all the shards before them.

    Args:
        unsure: whether another process may have replaced files since; their digests are then compared.
    """
    recorded = read_records(folder, generation, number - 1)
    sizes = folder.sizes([record.shard.path for _, record in recorded.shards])
    whole = 0
    while whole < len(sizes) and sizes[whole] == recorded.shards[whole][1].shard.bytes:
        whole += 1
    shards = [record for _, record in recorded.shards]
    lost = shards[whole:] + ([recorded.begun] if recorded.begun else [])
    kept = {record.shard.path for record in shards[:whole]}
    folder.remove_each([record.shard.path for record in lost if record.shard.path not in kept])
    files = {file.path: file for file in whole_files(folder, recorded.state, compare=unsure)}
    state = State(shards=_counts(claim for claim, _ in recorded.shards[:whole]))
    records = Records(folder, generation, number, state)
    records.set_files(files.values(), None)
    return shards[:whole], files, records


def whole_files(folder: Folder, state: State, *, compare: bool) -> list[Shard]:
    """The files beside the shards that are there; of one whose writing was cut off, whichever version is.

    Args:
        compare: whether to compare digests; else sizes, for all but the one whose writing was cut off.
    """
    files = {file.path: file for file in state.files}
    pending = state.pending
    unsure = [file for file in files.values() if compare or (pending and file.path == pending.path)]
    if pending is not None:
        unsure.insert(0, pending)
    sizes = folder.sizes(list(files))
    whole = {file.path: file for file, size in zip(files.values(), sizes, strict=True) if file.bytes == size}
    for path in {version.path for version in unsure}:
        present = _version_present(folder, [version for version in unsure if version.path == path])
        whole.pop(path, None)
        if present is not None:
            whole[path] = present
    return sorted(whole.values(), key=lambda file: file.path)


def _version_present(folder: Folder, versions: Sequence[Shard]) -> Shard | None:
    path = versions[0].path
    size = folder.size(path)
    if size not in [version.bytes for version in versions]:
        return None
    found = measure(folder.blocks(path, size))
    return next((version for version in versions if (version.bytes, version.sha256) == found), None)


def _counted(folder: Folder, generation: str, state: State) -> Iterator[tuple[int, ShardRecord]]:
    """The records that a state counts, up to the first that is missing or unreadable."""
    claims = [claim for claim, count in state.shards for _ in range(count)]
    names = [f"{place_of(generation, claim)}/shard-{number}.json" for number, claim in enumerate(claims)]
    for claim, data in zip(claims, folder.read_each(names), strict=True):
        record = _parsed(ShardRecord, data)
        if record is None:
            return
        yield claim, record


def _own(folder: Folder, place: str, first: int) -> Iterator[ShardRecord]:
    """The records from number `first` on, up to the first that is missing or unreadable."""
    while True:
        for data in folder.read_each([f"{place}/shard-{first + i}.json" for i in range(_READ_AT_ONCE)]):
            record = _parsed(ShardRecord, data)
            if record is None:
                return
            yield record
        first += _READ_AT_ONCE


def _counts(claims: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Runs of equal numbers, as (number, how many)."""
    counts: list[tuple[int, int]] = []
    for claim in claims:
        if counts and counts[-1][0] == claim:
            counts[-1] = (claim, counts[-1][1] + 1)
        else:
            counts.append((claim, 1))
    return tuple(counts)


def _parsed(kind: type[_R], data: bytes | None) -> _R | None:
    try:
        return None if data is None else kind.model_validate_json(data)
    except ValidationError:
        return None
