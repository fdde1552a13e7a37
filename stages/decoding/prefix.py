"""Prefix reuse: a slot keeps what its last sequence left, and a prompt that begins alike reads only the rest.

What may be kept is exact: row r of a slot is a function of the tokens up to r. A drafter's row is one of a
pair (state of x_i, x_{i+1}), so that a drafting sequence keeps one token less than it shares; its first own
token then brings the pair with the token that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST = 16
"""Tokens that are worth it."""

_BLOCK = 64
"""Tokens compared at once."""


@dataclass(frozen=True)
class Held:
    """What a slot holds of a sequence.

    tokens: the sequence, those that are not in the cache included.
    rows: of the target's cache, and pairs: of the drafter's; from the first token on.
    """

    tokens: Sequence[int]
    rows: int
    pairs: int

    def shared(self, prompt_ids: Sequence[int], drafts: bool) -> int:
        """Tokens of a prompt that need not be read; its last one must, as it brings the output's first."""
        common = _common(self.tokens, prompt_ids)
        if drafts:
            return max(0, min(common - 1, self.pairs, self.rows, len(prompt_ids) - 1))
        return min(common, self.rows, len(prompt_ids) - 1)


@dataclass(frozen=True)
class Place:
    """Where a sequence goes.

    source: the slot whose first ``known`` tokens it takes over, maybe its own.
    pairs: of those, what the drafter has in the sequence's own slot when it starts.
    """

    slot: int
    source: int
    known: int = 0
    pairs: int = 0


class WarmSlots:
    """What the free slots hold."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}  # the least recently used first

    def leave(self, slot: int, held: Held) -> None:
        """A sequence has left its slot."""
        self.forget(slot)
        self._held[slot] = held

    def forget(self, slot: int) -> None:
        """What the slot holds is of no use."""
        self._held.pop(slot, None)

    def clear(self) -> None:
        """What any slot holds is of no use."""
        self._held.clear()

    def take(
        self, free: Sequence[int], busy: Mapping[int, Held], prompt_ids: Sequence[int], drafts: bool
    ) -> Place:
        """A free slot for a prompt; it is no longer warm then.

        The slot with most of the prompt, if it is free and loses little by it; else an empty slot or the
        least recently used one, to which that one's tokens are to be copied.
        """
        holders = {**{slot: self._held[slot] for slot in free if slot in self._held}, **busy}
        shared = {slot: held.shared(prompt_ids, drafts) for slot, held in holders.items()}
        slot = next((slot for slot in free if slot not in self._held), None)
        if slot is None:
            slot = next(slot for slot in self._held if slot in free)
        source = max(shared, key=lambda s: shared[s], default=slot)
        known = shared.get(source, 0)
        if source in self._held and 2 * known >= holders[source].rows:
            slot = source
        place = Place(slot, slot)
        if known >= LEAST:
            here = holders[source].shared(prompt_ids, True) if source == slot else 0
            place = Place(slot, source, known, known if drafts else here)
        self.forget(slot)
        return place


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens that two sequences begin with both."""
    most, at = min(len(a), len(b)), 0
    while at < most and a[at : at + _BLOCK] == b[at : at + _BLOCK]:
        at += _BLOCK
    return next((i for i in range(at, most) if a[i] != b[i]), most)
