"""What became of every row that was read, by source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.errors import EagleError
from stages.prompts import Rejected

KEPT = "kept"
EXAMPLES = 3
_EARLY_ROWS, _EARLY_RATE = 1000, 0.9


@dataclass
class Tally:
    """Counts of rows by source and outcome; every row read has one outcome, `kept` or why it was not.

    Attributes:
        outcomes: source -> outcome -> rows.
        drawn: rows drawn from the sources so far, what becomes of them known or not.
        rejects: rows that were no prompts, over all sources.
        examples: the first few of those.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    drawn: int = 0
    rejects: int = 0
    examples: list[str] = field(default_factory=list)

    def count(self, source: str, outcome: str, rows: int = 1) -> None:
        self.outcomes.setdefault(source, Counter())[outcome] += rows

    def reject(self, source: str, row: Rejected) -> None:
        self.count(source, row.reason)
        self.rejects += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(str(row))

    @property
    def read(self) -> int:
        return sum(sum(counts.values()) for counts in self.outcomes.values())

    def total(self, outcome: str) -> int:
        return sum(counts[outcome] for counts in self.outcomes.values())

    def record(self) -> dict[str, Any]:
        """For the manifest: by source, the rows `read` and every outcome; `read` is the sum of the others."""
        return {
            source: {"read": sum(counts.values()), **dict(sorted(counts.items()))}
            for source, counts in sorted(self.outcomes.items())
        }

    def summary(self) -> str:
        """What was left out and why, in words."""
        return describe_left_out(self.record())

    def check(self, most: float, *, finished: bool) -> None:
        """Stops a stage that reads mostly rows that are no prompts.

        Args:
            most: highest share of rejected rows.
            finished: all rows were read. Before that, only a source that is nearly all rejects stops it.

        Raises:
            EagleError: there are more, with examples.
        """
        if not finished and (self.drawn < _EARLY_ROWS or self.rejects < max(most, _EARLY_RATE) * self.drawn):
            return
        if finished and self.rejects <= most * self.drawn:
            return
        raise EagleError(
            f"{self.rejects:,} of {self.drawn:,} rows are no prompts, such as: {'; '.join(self.examples)}. "
            "Name the field with --prompt-field, leave the source out, or raise --max-reject-rate"
        )


def describe_left_out(sources: Mapping[str, Mapping[str, int]]) -> str:
    """What was left out of all sources, such as "12 duplicates, 1 too long"; "" if nothing was."""
    total: Counter[str] = Counter()
    for counts in sources.values():
        total.update({outcome: rows for outcome, rows in counts.items() if outcome not in ("read", KEPT)})
    return ", ".join(f"{rows:,} {outcome.replace('_', ' ')}" for outcome, rows in total.most_common() if rows)
