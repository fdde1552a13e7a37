"""What the files so far have given, and which of them could not be used."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from stages.config import several
from stages.errors import EagleError

EXAMPLES = 3


class Tally(BaseModel):
    """Goes with every shard, so that another run continues the count.

    Attributes:
        files: seen so far, in order.
        clipped, dropped: rows longer than may be, of which a part or nothing was kept.
        unmasked: tokens that the source marks as the target's own and that stand behind the end of its turn.
        agreed: supervised positions at which the target's most likely token is the one that follows.
        rejected: files that were not used, by reason.
        examples: names of a few of them, by reason.
    """

    model_config = ConfigDict(extra="forbid")

    files: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    clipped: int = 0
    dropped: int = 0
    unmasked: int = 0
    agreed: int = 0
    rejected: dict[str, int] = {}
    examples: dict[str, list[str]] = {}

    @property
    def skipped(self) -> int:
        return sum(self.rejected.values())

    @property
    def agreement(self) -> float:
        """Share of the labels that the target itself thinks most likely."""
        return self.agreed / max(1, self.supervised)

    def reject(self, name: str, reason: str) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(name)

    def reasons(self) -> str:
        """`4 not finite (hs_2.safetensors, ...), 1 damaged (hs_9.safetensors)`, the commonest first."""
        parts = []
        for reason, count in sorted(self.rejected.items(), key=lambda item: -item[1]):
            more = ", ..." if count > EXAMPLES else ""
            parts.append(f"{count} {reason} ({', '.join(self.examples[reason])}{more})")
        return ", ".join(parts)

    def check(self, source: str, total: int, max_reject_rate: float) -> None:
        """Stops as soon as more of the `total` files are rejected than may be, whatever the rest is like.

        Raises:
            EagleError: there are more.
        """
        if self.skipped > max_reject_rate * total:
            raise EagleError(
                f"{self.skipped} of the first {self.files} of {several(total, 'file')} in {source} cannot "
                "be used: "
                f"{self.reasons()}: more than --max-reject-rate {max_reject_rate:g}; mend them or raise it, "
                "and run the same command again"
            )
