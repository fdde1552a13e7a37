"""What became of every row that was read, by source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.config import several
from stages.errors import EagleError
from stages.prompts import Rejected

KEPT = "kept"
NOT_NEEDED = "not_needed"
"""Read ahead, and not used since there were enough."""

EXAMPLES = 3
_ADVICE = "Name the field with --prompt-field, leave the source out, or raise --max-reject-rate"
_EARLY_ROWS, _EARLY_RATE = 1000, 0.9


@dataclass
class Tally:
    """Counts of rows by source and outcome; every row read has one outcome, `kept` or why it was not.

    Attributes:
        outcomes: source -> outcome -> rows.
        drawn: rows drawn from each source so far, what becomes of them known or not.
        rejects: rows that were no prompts, over all sources; without those that are parts of others by right.
        examples: the first few of those, each with something else that is wrong.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    drawn: Counter[str] = field(default_factory=Counter)
    rejects: int = 0
    examples: list[str] = field(default_factory=list)
    _details: set[str] = field(default_factory=set)

    def count(self, source: str, outcome: str, rows: int = 1) -> None:
        self.outcomes.setdefault(source, Counter())[outcome] += rows

    def draw(self, source: str) -> None:
        self.drawn[source] += 1

    def reject(self, source: str, row: Rejected) -> None:
        self.count(source, row.reason)
        if row.reason == "inside_conversation":  # well-formed, and no sign that rows are misread
            return
        self.rejects += 1
        if len(self.examples) < EXAMPLES and row.detail not in self._details:
            self._details.add(row.detail)
            self.examples.append(str(row))

    @property
    def read(self) -> int:
        return sum(sum(counts.values()) for counts in self.outcomes.values())

    def close(self, chosen: Counter[str]) -> None:
        """Counts what was drawn and has no outcome.

        Args:
            chosen: rows whose outcome is still to come, by source.
        """
        for source, drawn in self.drawn.items():
            rest = drawn - chosen[source] - sum(self.outcomes.get(source, Counter()).values())
            if rest:
                self.count(source, NOT_NEEDED, rest)

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

    def check(self, most: float, *, finished: bool, advice: str = _ADVICE) -> None:
        """Stops a stage that reads mostly rows that are no prompts.

        Args:
            most: highest share of rejected rows.
            finished: all rows were read. Before that, only a source that is nearly all rejects stops it.
            advice: what to do about it, in words.

        Raises:
            EagleError: there are more, with examples.
        """
        drawn = self.drawn.total()
        if not finished and (drawn < _EARLY_ROWS or self.rejects < max(most, _EARLY_RATE) * drawn):
            return
        if finished and self.rejects <= most * drawn:
            return
        raise EagleError(
            f"{self.rejects:,} of {several(drawn, 'row')} "
            f"{'is no prompt' if self.rejects == 1 else 'are no prompts'}, such as: "
            f"{'; '.join(self.examples)}. "
            f"{advice}"
        )


def describe_left_out(sources: Mapping[str, Mapping[str, int]]) -> str:
    """What was left out of all sources, such as "12 duplicates, 1 too long"; "" if nothing was."""
    total: Counter[str] = Counter()
    for counts in sources.values():
        total.update(
            {outcome: rows for outcome, rows in counts.items() if outcome not in ("read", KEPT, NOT_NEEDED)}
        )
    return ", ".join(f"{rows:,} {outcome.replace('_', ' ')}" for outcome, rows in total.most_common() if rows)
