"""What a planner remembers from cycle to cycle: whether drafting has paid, and when to look again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FIRST_WAIT = 16
"""Plain cycles a sequence of the batch before drafting is tried again, at first: a trial costs more, the more
sequences there are, as the drafter must first read what all of them hold."""

LONGEST_WAIT = 256
"""What every wait grows to."""

MEMORY = 48
"""Cycles after which older ones fade."""


@dataclass
class Wait:
    """Cycles of any batch from one time that something is done to the next; from wait to wait there are
    more.

    first: cycles of the first one; growth: how many times as many the next has; cycles: of the last one.
    """

    first: int = FIRST_WAIT
    growth: float = 2.0
    cycles: int = 0
    until: int = 0

    def over(self, clock: int) -> bool:
        return clock >= self.until

    def begin(self, clock: int, sequences: int = 1) -> None:
        """A longer one, or the same anew where it is not over; so many cycles for each sequence."""
        if self.over(clock):
            self.cycles = min(int(self.growth * self.cycles) or self.first, LONGEST_WAIT)
        self.until = clock + self.cycles * sequences


@dataclass
class Habit:
    """Whether a sequence drafts, or a batch.

    gain: mean tokens that a drafting cycle has gained lately over a plain one; weight: cycles it rests on;
        variance: of the gains, a guess at first.
    tried: whether it has been given up before; then a trial must show a gain.
    wait: until drafting is tried again.
    """

    gain: float = 0.0
    weight: float = 0.0
    variance: float = 0.4
    drafting: bool = True
    tried: bool = False
    wait: Wait = field(default_factory=Wait)

    def learn(self, gain: float, memory: float) -> None:
        self.weight = min(self.weight + 1, memory)
        off = gain - self.gain
        self.gain += off / self.weight
        self.variance += (off * (gain - self.gain) - self.variance) / (self.weight + 4)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(self.variance / max(self.weight, 1.0))


@dataclass
class Rate:
    """Tokens a second of drafting cycles; old ones fade."""

    tokens: float = 0.0
    seconds: float = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        fade = 1 - 1 / MEMORY
        self.tokens, self.seconds = fade * self.tokens + tokens, fade * self.seconds + seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0
