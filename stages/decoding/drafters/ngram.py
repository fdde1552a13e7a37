"""Drafting by looking up: what followed the last few tokens where they stood before, in prompt and output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from stages.decoding.drafters.calibration import Calibrations
from stages.decoding.drafters.drafter import Slots, StateKind
from stages.decoding.growth import TreeGrowth, grow, log, trees
from stages.decoding.row_tensors import PlacedRows
from stages.decoding.sampling import SamplingParams
from stages.decoding.tree import DraftTree, TreePlan
from stages.errors import EagleError

MOST_MATCHES = 16
"""Places that are looked at, the latest first."""


class NgramDrafter:
    """Proposes the continuations of the longest match, each as probable as it is frequent among the matches,
    later ones counting more.

    One match says little about how likely its continuation is, so that m matches share m / (m + 1) of the
    probability; what a tree with prices makes of it is calibrated.
    """

    state: StateKind = "none"
    cache = None

    def __init__(self, least: int = 2, most: int = 4, *, calibrations: Calibrations | None = None) -> None:
        """``least`` to ``most`` tokens must match.

        Raises:
            EagleError: not 1 <= least <= most.
        """
        if not 1 <= least <= most:
            raise EagleError(f"ngram:min={least},max={most}: min is at least 1 and max no less than min")
        self.calibrations = calibrations or Calibrations()
        self.passes: list[int] = []
        self.rows: PlacedRows | None = None
        self._least, self._most = least, most
        self._sequences: Slots[_Text] = Slots()

    def start(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        known: int = 0,
        source: int | None = None,
    ) -> None:
        text = _Text(self._least, self._most, params)
        text.append(prompt_ids[: known + 1])
        self._sequences.put(slot, text)

    def extend(self, slots: Sequence[int], states: Tensor | None, tokens: Sequence[Sequence[int]]) -> None:
        for slot, new in zip(slots, tokens, strict=True):
            text = self._sequences[slot]
            if text.growth is not None:
                self.calibrations.at(text.params.temperature).observe(text.growth.outcomes(new))
                text.growth = None
            text.append(new)

    def propose(self, slots: Sequence[int], plans: Sequence[TreePlan]) -> list[DraftTree]:
        growths: list[TreeGrowth] = []
        for slot, plan in zip(slots, plans, strict=True):
            text = self._sequences[slot]
            confidence = self.calibrations.at(text.params.temperature) if plan.prices else None
            text.growth = TreeGrowth(plan, text.ids[-1], confidence)
            growths.append(text.growth)
        texts = [self._sequences[slot] for slot in slots]
        held = [{-1: text.continuations(plan.depth)} for text, plan in zip(texts, plans, strict=True)]

        def children(b: int, candidate: int) -> tuple[list[int], list[float]]:
            ordered, probabilities, following = _next(held[b].get(candidate, []))
            width = growths[b].plan.width
            for i, token in enumerate(ordered[:width], start=growths[b].candidates):
                held[b][i] = following[token]
            return ordered[:width], [log(probability) for probability in probabilities[:width]]

        grow(growths, children)
        return trees(growths)


def _next(matches: Sequence[list[int]]) -> tuple[list[int], list[float], dict[int, list[list[int]]]]:
    """The tokens that come next in some of the matches, most frequent first, their probabilities, and what
    follows each."""
    weight: dict[int, float] = defaultdict(float)
    following: dict[int, list[list[int]]] = defaultdict(list)
    for age, ids in enumerate(matches):
        if ids:
            weight[ids[0]] += 0.9**age
            following[ids[0]].append(ids[1:])
    count = sum(map(len, following.values()))
    share = count / (count + 1) / max(sum(weight.values()), 1e-9)
    ordered = sorted(weight, key=lambda token: (-weight[token], token))
    return ordered, [share * weight[token] for token in ordered], following


class _Text:
    """The tokens of a sequence, and where each run of tokens ends in it."""

    def __init__(self, least: int, most: int, params: SamplingParams) -> None:
        self.ids: list[int] = []
        self.params = params
        self.growth: TreeGrowth | None = None
        self._sizes = range(most, least - 1, -1)
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.ids.append(token)
            end = len(self.ids)
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self.ids[end - size : end])].append(end)

    def continuations(self, depth: int) -> list[list[int]]:
        """Up to ``depth`` tokens that followed the longest run with a match, the latest match first."""
        for size in self._sizes:
            ends = self._ends.get(tuple(self.ids[-size:]), []) if size <= len(self.ids) else []
            if len(ends) > 1:  # the last one is the end of the text itself
                latest = ends[-2 : -2 - MOST_MATCHES : -1]
                return [self.ids[end : end + depth] for end in latest]
        return []
