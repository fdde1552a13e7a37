"""Held-out answers decoded again by the engine, cycle by cycle, against what training expects of each cycle.

Both sides are counted over the same stretches of the same text, so that the difference between them is that
of the two code paths and the two sets of states, and not that of two samples of text. A stretch is where the
target, decoding greedily, says what the row says. Where it says something else (a row that was sampled, or
rounding at a near-tie) the cycle counts on neither side, and decoding starts again behind the row's token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stages.decoding.model import EagleModel
from stages.decoding.parity.record import ExpectedRow
from stages.decoding.sampling import SamplingParams
from stages.features.layout import FeatureRow

STARTS = 8
"""Most prefills a row: a sampled row leaves the greedy path often."""


@dataclass(frozen=True)
class Cycles:
    """Verify steps, and the drafts accepted in them."""

    steps: int = 0
    accepted: int = 0

    def __add__(self, other: Cycles) -> Cycles:
        return Cycles(self.steps + other.steps, self.accepted + other.accepted)

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.accepted / max(self.steps, 1)


@dataclass(frozen=True)
class ReplayedRow:
    """What training predicts of the stretches that were replayed, and what decoding measured there."""

    predicted: Cycles
    measured: Cycles


def replay_row(model: EagleModel, row: FeatureRow, expected: ExpectedRow) -> ReplayedRow:
    """Decodes the answers of a row with the model's chain, in the model's dtype."""
    ids = row.input_ids.tolist()
    lengths = dict(zip(row.supervised.tolist(), expected.lengths.tolist(), strict=True))
    predicted = measured = Cycles()
    starts = 0
    for first, last in turns(row):
        begin = first  # position of the next token that the target is to choose after a prefill
        while begin <= last and starts < STARTS:
            starts += 1
            stretch = _decode(model, ids, begin, last + 1)
            measured += Cycles(len(stretch.accepted), sum(stretch.accepted))
            predicted += walk(lengths, begin, stretch.end, last + 1)
            begin = stretch.begin_again
    return ReplayedRow(predicted, measured)


@dataclass(frozen=True)
class _Stretch:
    """accepted: drafts of each cycle that counts; end: position of the last root reached by them."""

    accepted: list[int]
    end: int
    begin_again: int


def _decode(model: EagleModel, ids: Sequence[int], begin: int, last: int) -> _Stretch:
    """Decodes behind ids[:begin], up to position `last`, for as long as the output is the row's."""
    params = SamplingParams(max_new_tokens=last - begin + 1)
    root, accepted = begin, list[int]()
    for number, tokens in enumerate(model.stream(list(ids[:begin]), params)):
        first = begin if number == 0 else root + 1
        agreed = _common(tokens, ids[first : last + 1])
        if agreed < len(tokens):
            return _Stretch(accepted, root, first + agreed + 1)
        if number:
            accepted.append(len(tokens) - 1)
        root = first + len(tokens) - 1
    return _Stretch(accepted, root, last + 1 if root >= last else root + 2)


def walk(lengths: dict[int, int], begin: int, end: int, last: int) -> Cycles:
    """The cycles that training predicts from the root at `begin` to the root at `end`.

    Args:
        lengths: of the drafts that are right behind each position.
        last: the turn's last position; the decoder drafts no token beyond it, nor that token itself.
    """
    steps = accepted = 0
    while begin < end:
        right = min(lengths[begin], last - begin - 1, end - begin - 1)
        steps, accepted, begin = steps + 1, accepted + right, begin + right + 1
    return Cycles(steps, accepted)


def turns(row: FeatureRow) -> list[tuple[int, int]]:
    """First and last supervised position of each turn of a row."""
    positions = row.supervised.tolist()
    breaks = [i for i, (a, b) in enumerate(pairwise(positions), start=1) if b != a + 1]
    return [(positions[i], positions[j - 1]) for i, j in pairwise([0, *breaks, len(positions)])]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
