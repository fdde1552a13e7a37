"""What a target's forward and a drafter's pass take, by rows: measured once, corrected by every cycle."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from stages.errors import EagleError

_FIRST_SIGHT = 4
"""Cycles that a measured time counts for."""

_HOLD = 4
"""Corrections that are taken in at once."""

_FEW, _BEYOND = 4, 1.25
"""A table with fewer entries is given those that lie so far beyond its last."""


class Costs:
    """Seconds of a verification and of a drafter's pass, by rows; what was measured, corrected by what is
    observed."""

    def __init__(
        self, verify: Mapping[int, float], draft: Mapping[int, float], *, padded: bool = False
    ) -> None:
        """Args:
            verify, draft: seconds by rows of the whole batch, at least one entry each; a drafter without cost
                has {1: 0.0}.
            padded: rows between two entries cost what the next one does, as where shapes are fixed; else
                they lie on the line between.

        Raises:
            EagleError: a table is empty or has an entry that is no time.
        """
        for name, table in (("verify", verify), ("draft", draft)):
            if (
                not table
                or min(table) < 1
                or min(table.values()) < 0
                or (name == "verify" and 0 in table.values())
            ):
                raise EagleError(f"the table of {name} costs must give seconds by rows, not {dict(table)}")
        self._verify, self._draft = _Table(verify, padded), _Table(draft, padded)

    def verify_s(self, rows: int) -> float:
        """Seconds of a verification of so many rows."""
        return self._verify.at(rows)

    def draft_s(self, rows: int) -> float:
        """Seconds of a drafter's pass over so many rows."""
        return self._draft.at(rows)

    def observe(self, rows: int, verify_s: float, passes: Sequence[int], draft_s: float) -> None:
        """What a cycle took: a verification of ``rows``, and drafter passes of so many rows each."""
        self._verify.correct([rows], verify_s)
        if passes:
            self._draft.correct(passes, draft_s)


class _Shift:
    """Deviations in a row, of which those count that the next one confirms: one stutter moves nothing."""

    def __init__(self) -> None:
        self._last = 0.0

    def take(self, off: float) -> float:
        last, self._last = self._last, off
        if last * off <= 0:
            return 0.0
        return last if abs(last) < abs(off) else off


class _Entry:
    """What was measured may have met a busy machine, so the first corrections count most."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._seen = _FIRST_SIGHT
        self._shift = _Shift()

    def correct(self, off: float) -> None:
        if shift := self._shift.take(off):
            self.seconds *= math.exp(shift * max(0.02, 1 / self._seen))
        self._seen += 1


class _Table:
    def __init__(self, seconds: Mapping[int, float], padded: bool) -> None:
        self._sizes = sorted(seconds)
        self._padded = padded
        self._all = 1.0  # of the machine as it is now, over what was measured
        self._each = [_Entry(seconds[size]) for size in self._sizes]
        self._last = _Shift()
        self._known: dict[int, float] = {}  # of what was asked for
        self._take_in()

    def at(self, rows: int) -> float:
        known = self._known.get(rows)
        if known is None:
            known = self._known[rows] = self._measured(rows)
        return self._all * known

    def _measured(self, rows: int) -> float:
        """Seconds on the machine as it was when it was measured."""
        sizes, i = self._sizes, bisect_left(self._sizes, rows)
        if i == len(sizes):  # beyond the last: on the line through the last two
            here = self._values[i - 1]
            if i == 1:
                return here * rows / sizes[0]
            slope = (here - self._values[i - 2]) / (sizes[i - 1] - sizes[i - 2])
            return here + slope * (rows - sizes[i - 1])
        if i == 0 or self._padded or sizes[i] == rows:
            return self._values[i]
        low, high = self._values[i - 1], self._values[i]
        return low + (high - low) * (rows - sizes[i - 1]) / (sizes[i] - sizes[i - 1])

    def correct(self, rows: Sequence[int], seconds: float) -> None:
        expected = sum(map(self.at, rows))
        if expected <= 0 or seconds <= 0:
            return
        if max(rows) > _BEYOND * self._sizes[-1] and len(self._sizes) < _FEW and len(rows) == 1:
            self._add(rows[0], seconds / self._all)
            return
        if max(rows) > 2 * self._sizes[-1]:
            return  # far beyond the table the line says little, and would bend its end
        off = math.log(max(0.5, min(2.0, seconds / expected)))
        # What shifts from one second to the next is mostly the machine, and so all rows alike.
        if shift := self._last.take(off):
            self._all *= math.exp(0.3 * shift)
        # Once each: passes of one cycle do not confirm each other.
        hits: dict[int, int] = {}
        for r in rows:
            i = min(bisect_left(self._sizes, r), len(self._sizes) - 1)
            hits[i] = hits.get(i, 0) + 1
        for i, count in hits.items():
            self._each[i].correct(off * count / len(rows))
        self._stale += 1
        if self._stale == _HOLD:
            self._take_in()

    def _add(self, size: int, seconds: float) -> None:
        """A table that is short, as of a slow machine, learns its further entries from what comes."""
        self._sizes.append(size)
        self._each.append(_Entry(seconds))
        self._take_in()

    def _take_in(self) -> None:
        self._values = _rising([entry.seconds for entry in self._each])
        self._known.clear()
        self._stale = 0  # corrections since


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest numbers, in squares, that never fall: more rows take no less time, whatever was measured on
    a busy machine. (Pooling adjacent violators: Ayer et al., 1955.)"""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            total, count = total + pools[-1][0], count + pools[-1][1]
            pools.pop()
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
