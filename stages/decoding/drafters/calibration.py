"""How far a drafter's probabilities can be believed, learned from what the target accepted.

A candidate that the drafter gives the probability q, d levels below the root, is accepted with

    P = sigmoid(a_d + b_d * logit(q))                       (Platt's calibration)

once its parent is. Each (a_d, b_d) starts at (0, 1), which is the drafter's word, and follows the outcomes by
Newton steps of a logistic regression whose past fades, so that it tracks a change of text. What a level will
bring before it is drafted is the mean outcome of children so far, by their rank and how sure their parents
were.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from stages.decoding.growth import Outcome

MAX_DEPTH = 6
"""Levels below share one estimate."""

MAX_RANKS = 4
"""Children of a node, best first, whose outcomes are told apart."""

_FADING = 0.999
_TRUST = 20.0
"""Outcomes that the starting values weigh as much as."""

_SURE = (0.35, 0.6, 0.85)
"""Bounds between the kinds of parents."""


class Calibration:
    """Estimates for one drafter at one kind of temperature; see `Calibrations`."""

    def __init__(self) -> None:
        self._curves = [_Curve() for _ in range(MAX_DEPTH)]
        self._means = [[_Means(kind) for kind in range(len(_SURE) + 1)] for _ in range(MAX_DEPTH)]

    def probability(self, depth: int, stated: float) -> float:
        """That a child of an accepted node is accepted, if the drafter says ``stated``."""
        return self._curves[min(depth, MAX_DEPTH) - 1].at(_logit(stated))

    def expected(self, depth: int, parent: float) -> list[float]:
        """The same of each child of a node that had the chance ``parent``, best first, before they are
        drafted."""
        return self._means[min(depth, MAX_DEPTH) - 1][_kind(parent)].values

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            level = min(outcome.depth, MAX_DEPTH) - 1
            self._curves[level].learn(_logit(outcome.stated), outcome.hit)
            if outcome.rank < MAX_RANKS:
                self._means[level][_kind(outcome.parent)].learn(outcome.rank, outcome.hit)


class Calibrations:
    """One calibration for each kind of temperature: greedy, and half steps of it."""

    def __init__(self) -> None:
        self._by_kind: dict[int, Calibration] = {}

    def at(self, temperature: float) -> Calibration:
        kind = temperature_kind(temperature)
        if kind not in self._by_kind:
            self._by_kind[kind] = Calibration()
        return self._by_kind[kind]


def temperature_kind(temperature: float) -> int:
    """0 for greedy, then 1 for temperatures to 0.5, 2 to 1.0, 3 to 1.5, 4 for those above."""
    return min(math.ceil(temperature * 2), 4)


class _Curve:
    """Logistic regression on one number; past outcomes fade."""

    def __init__(self) -> None:
        self._a, self._b = 0.0, 1.0
        # The curvature of the log-likelihood, [[aa, ab], [ab, bb]], starts as that of _TRUST even outcomes.
        self._aa, self._ab, self._bb = _TRUST / 4, 0.0, _TRUST / 2

    def at(self, x: float) -> float:
        """x: a clipped logit, so that what is raised to a power stays small."""
        return 1.0 / (1.0 + math.exp(-self._a - self._b * x))

    def learn(self, x: float, hit: bool) -> None:
        p = self.at(x)
        weight = max(p * (1 - p), 0.01)
        # Fading stops where little is known, so that a rare level keeps what it has.
        fade = _FADING if self._aa > _TRUST / 4 else 1.0
        self._aa = fade * self._aa + weight
        self._ab = fade * self._ab + weight * x
        self._bb = fade * self._bb + weight * x * x
        determinant = max(self._aa * self._bb - self._ab * self._ab, 1e-6)
        error = hit - p
        self._a += error * (self._bb - self._ab * x) / determinant
        self._b += error * (self._aa * x - self._ab) / determinant
        self._a, self._b = max(-5.0, min(5.0, self._a)), max(0.1, min(3.0, self._b))


class _Means:
    """Mean outcome by a child's rank; old ones fade, a few imagined ones of the starting value come first."""

    def __init__(self, kind: int) -> None:
        first = 0.7 * (kind + 1) / (len(_SURE) + 1)
        self.values = [first, *((1 - first) * 0.5**rank / 3 for rank in range(1, MAX_RANKS))]
        self._weights = [8.0] * MAX_RANKS

    def learn(self, rank: int, hit: bool) -> None:
        weight = self._weights[rank] = min(self._weights[rank] + 1.0, 200.0)
        self.values[rank] += (hit - self.values[rank]) / weight


def _logit(probability: float) -> float:
    if not 1e-4 < probability < 1 - 1e-4:
        return -9.21024 if probability < 0.5 else 9.21024
    return math.log(probability / (1 - probability))


def _kind(chance: float) -> int:
    return bisect_right(_SURE, chance)
