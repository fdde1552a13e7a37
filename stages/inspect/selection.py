"""Which rows to show, and which shards they are in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stages.artifacts import Shard
from stages.config import several
from stages.errors import EagleError
from stages.inspect.config import InspectConfig


@dataclass(frozen=True)
class Selection:
    """`count` rows from number `start` on, counted from 0; or the one with this id."""

    start: int
    count: int
    id: str | None = None

    @classmethod
    def of(cls, config: InspectConfig) -> Selection:
        return cls(config.row_start, config.rows, config.row)

    @property
    def empty(self) -> bool:
        return not self.count and self.id is None

    def shards(self, shards: Sequence[Shard]) -> Iterator[tuple[int, Shard, range]]:
        """The shards to read: number of the first row, shard, and which rows of it; all of it for an id."""
        first = 0
        for shard in shards:
            if self.id is not None:
                yield first, shard, range(shard.rows)
            else:
                begin, end = max(self.start - first, 0), min(self.start + self.count - first, shard.rows)
                if begin < end:
                    yield first, shard, range(begin, end)
            first += shard.rows

    def nothing(self, uri: str, rows: int) -> EagleError:
        """The error for a selection that matches none of so many rows."""
        if self.id is not None:
            return EagleError(f"{uri} has no row {self.id} among its {rows:,}: check --row")
        if not rows:
            return EagleError(f"{uri} has no rows yet")
        return EagleError(
            f"--row-start {self.start:,} is beyond the {several(rows, 'row')} of {uri}: the first is 0"
        )
