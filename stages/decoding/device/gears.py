"""Which of a few shapes to draft in: the one that puts out most tokens a second, by what was measured.

Every shape is a set of graphs, so there are few, plain decoding among them. For each padded batch size the
tokens and seconds of its cycles are kept, old ones fading. A shape is tried when it is new, and again now and
then: ever more seldom as long as it loses. The text does not depend on any of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL = 8
"""Cycles of a trial; the very first may build what the shape needs and does not count."""

FIRST_WAIT = 256
LONGEST_WAIT = 2048
"""Cycles of a batch size until a shape that has lost is tried again."""

_MARGIN = 1.03
"""How much faster another shape must be to be taken up."""

_FADING = 0.97
_OLD = 0.1


@dataclass
class _Shape:
    tokens: float = 0.0
    seconds: float = 0.0
    wait: int = FIRST_WAIT
    due: int = 0
    skip: int = 1

    def forget(self) -> None:
        """Let what comes now count for more than what was."""
        self.tokens, self.seconds = _OLD * self.tokens, _OLD * self.seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class _Size:
    """One padded batch size.

    clock: cycles so far; left: of the trial that is going on, of shape ``trial``.
    """

    shapes: list[_Shape]
    best: int = 0
    clock: int = 0
    trial: int = 0
    left: int = 0


@dataclass
class Gears:
    """``count`` shapes, numbered from 0."""

    count: int
    _sizes: dict[int, _Size] = field(default_factory=dict)

    def choose(self, size: int) -> int:
        """The shape of the next cycle of a padded batch size."""
        if self.count == 1:
            return 0
        at = self._sizes.setdefault(size, _Size([_Shape() for _ in range(self.count)]))
        at.clock += 1
        if at.left == 0:
            waiting = [n for n, shape in enumerate(at.shapes) if shape.due <= at.clock and n != at.best]
            if not at.shapes[at.best].tokens:
                waiting = [at.best]
            if not waiting:
                return at.best
            at.trial, at.left = waiting[0], TRIAL
            at.shapes[at.trial].forget()
        at.left -= 1
        if at.left == 0:
            tried = at.shapes[at.trial]
            tried.due = at.clock + tried.wait
            tried.wait = min(2 * tried.wait, LONGEST_WAIT)
        return at.trial

    def observe(self, size: int, shape: int, tokens: float, seconds: float) -> None:
        """What a cycle came to: tokens of a sequence, on average."""
        if self.count == 1:
            return
        at = self._sizes[size]
        seen = at.shapes[shape]
        if seen.skip:
            seen.skip -= 1
            return
        seen.tokens = _FADING * seen.tokens + tokens
        seen.seconds = _FADING * seen.seconds + seconds
        fastest = max(range(self.count), key=lambda n: at.shapes[n].rate)
        if at.shapes[fastest].rate > _MARGIN * at.shapes[at.best].rate:
            at.best, at.shapes[fastest].wait = fastest, FIRST_WAIT
            for other in at.shapes:  # the text may have changed: who lost before may win now
                other.due = min(other.due, at.clock + FIRST_WAIT)
