"""What decoding one request took."""

from __future__ import annotations

from dataclasses import dataclass, field

from stages.decoding.tree import DraftTree


@dataclass
class DecodeStats:
    """Counts and seconds of one request.

    reused: prompt tokens that were not read, as a slot held them.
    steps: verify forwards, one a cycle; the prefill and the token it chooses are not counted.
    tokens: tokens those steps put out.
    drafted, accepted: drafted nodes verified, and those of them that entered the output.
    accepted_per_depth: how often level d + 1 of a tree was accepted.
    prefill_s, decode_s, draft_s, verify_s: of the steps it took part in, with whatever ran beside it.
    """

    reused: int = 0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    accepted_per_depth: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Tokens a verify step puts out, the target's own included (tau of the papers); 1 for plain
        decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def accepted_per_step(self) -> float:
        return self.accepted / self.steps if self.steps else 0.0

    def count(self, tree: DraftTree, tokens: int, accepted: int) -> None:
        """Add a cycle that verified ``tree`` and put out ``tokens``, ``accepted`` of them drafted."""
        self.add(tree.drafted, max(tree.depths), tokens, accepted)

    def add(self, drafted: int, depth: int, tokens: int, accepted: int) -> None:
        """The same, of a tree with so many drafted nodes and levels."""
        self.steps += 1
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        levels = self.accepted_per_depth
        levels.extend([0] * (depth - len(levels)))
        for depth in range(accepted):
            levels[depth] += 1
