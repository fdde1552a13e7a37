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
from typing import Any

import torch

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
    """Estimates for one drafter at one kind of temperature; see `Calibrations`.

    numbers: all of them, float64, in the memory that the CPU op of a whole drafting cycle reads and corrects
        too: the curves of each depth, then the means of each depth, kind of parent and rank.
    """

    def __init__(self) -> None:
        kinds = range(len(_SURE) + 1)
        means = [number for kind in kinds for number in _first_means(kind)] * MAX_DEPTH
        self.numbers = torch.tensor([*_Curve.START] * MAX_DEPTH + means, dtype=torch.float64)
        data: Any = self.numbers.numpy()
        numbers: memoryview[float] = memoryview(data)
        cut = MAX_DEPTH * len(_Curve.START)
        self._curves = [_Curve(part) for part in _parts(numbers[:cut], MAX_DEPTH)]
        self._means = [
            [_Means(part) for part in _parts(level, len(_SURE) + 1)]
            for level in _parts(numbers[cut:], MAX_DEPTH)
        ]

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
    """Logistic regression on one number; past outcomes fade.

    Its numbers: a, b, and the curvature of the log-likelihood, aa, ab, bb of [[aa, ab], [ab, bb]].
    """

    START = (0.0, 1.0, _TRUST / 4, 0.0, _TRUST / 2)
    """The curvature is that of _TRUST even outcomes."""

    def __init__(self, numbers: memoryview[float]) -> None:
        self._numbers = numbers

    def at(self, x: float) -> float:
        """x: a clipped logit, so that what is raised to a power stays small."""
        a, b = self._numbers[0], self._numbers[1]
        return 1.0 / (1.0 + math.exp(-a - b * x))

    def learn(self, x: float, hit: bool) -> None:
        p = self.at(x)
        a, b, aa, ab, bb = self._numbers
        weight = max(p * (1 - p), 0.01)
        # Fading stops where little is known, so that a rare level keeps what it has.
        fade = _FADING if aa > _TRUST / 4 else 1.0
        aa = fade * aa + weight
        ab = fade * ab + weight * x
        bb = fade * bb + weight * x * x
        determinant = max(aa * bb - ab * ab, 1e-6)
        error = hit - p
        a += error * (bb - ab * x) / determinant
        b += error * (aa * x - ab) / determinant
        found = (max(-5.0, min(5.0, a)), max(0.1, min(3.0, b)), aa, ab, bb)
        for i, number in enumerate(found):
            self._numbers[i] = number


class _Means:
    """Mean outcome by a child's rank; old ones fade. Its numbers: of each rank the mean and its weight."""

    def __init__(self, numbers: memoryview[float]) -> None:
        self._numbers = numbers

    @property
    def values(self) -> list[float]:
        return list(self._numbers[::2])

    def learn(self, rank: int, hit: bool) -> None:
        mean, weight = self._numbers[2 * rank], min(self._numbers[2 * rank + 1] + 1.0, 200.0)
        self._numbers[2 * rank] = mean + (hit - mean) / weight
        self._numbers[2 * rank + 1] = weight


def _first_means(kind: int) -> list[float]:
    """What `_Means` starts from: a few imagined outcomes."""
    first = 0.7 * (kind + 1) / (len(_SURE) + 1)
    values = [first, *((1 - first) * 0.5**rank / 3 for rank in range(1, MAX_RANKS))]
    return [number for value in values for number in (value, 8.0)]


def _parts(numbers: memoryview[float], count: int) -> list[memoryview[float]]:
    size = len(numbers) // count
    return [numbers[i * size : (i + 1) * size] for i in range(count)]


def _logit(probability: float) -> float:
    if not 1e-4 < probability < 1 - 1e-4:
        return 9.21024 if probability > 0.5 else -9.21024
    return math.log(probability / (1 - probability))


def _kind(chance: float) -> int:
    return bisect_right(_SURE, chance)
