"""A drafter that knows the output: for tests, and to measure an engine at a known acceptance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.decoding.drafters.drafter import Slots, StateKind
from stages.decoding.growth import TreeGrowth, grow, log, trees
from stages.decoding.row_tensors import PlacedRows
from stages.decoding.sampling import SamplingParams
from stages.decoding.tree import DraftTree, TreePlan
from stages.errors import EagleError


@dataclass
class _Known:
    """reference: prompt and output; position: of the root."""

    reference: Sequence[int]
    position: int = 0
    root: int = 0


class OracleDrafter:
    """The best child of a node is the output's own token with the probability ``right``, else a wrong one, as
    are its other children. Which it is depends on the position alone."""

    state: StateKind = "none"
    cache = None

    def __init__(self, right: float, vocab_size: int, *, seed: int = 0) -> None:
        """Raises EagleError: ``right`` is no probability."""
        if not 0.0 <= right <= 1.0:
            raise EagleError(f"oracle:{right}: give a probability, as in oracle:0.8")
        self.passes: list[int] = []
        self.rows: PlacedRows | None = None
        self.right, self._vocab_size, self._seed = right, vocab_size, seed
        self.references: dict[tuple[int, ...], list[int]] = {}
        self._sequences: Slots[_Known] = Slots()

    def know(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """What the target puts out for a prompt."""
        self.references[tuple(prompt_ids)] = [*prompt_ids, *output_ids]

    def start(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        known: int = 0,
        source: int | None = None,
    ) -> None:
        """Raises EagleError: the output for this prompt is not known."""
        reference = self.references.get(tuple(prompt_ids))
        if reference is None:
            raise EagleError("the oracle drafter has no output for this prompt; decode it plainly first")
        self._sequences.put(slot, _Known(reference, position=known, root=prompt_ids[known]))

    def extend(self, slots: Sequence[int], states: Tensor | None, tokens: Sequence[Sequence[int]]) -> None:
        for slot, new in zip(slots, tokens, strict=True):
            sequence = self._sequences[slot]
            sequence.position += len(new)
            sequence.root = new[-1]

    def propose(self, slots: Sequence[int], plans: Sequence[TreePlan]) -> list[DraftTree]:
        sequences = [self._sequences[slot] for slot in slots]
        growths = [TreeGrowth(plan, s.root) for plan, s in zip(plans, sequences, strict=True)]

        def children(b: int, candidate: int) -> tuple[list[int], list[float]]:
            depth = growths[b].depth(candidate) + 1 if candidate >= 0 else 1
            return self._children(
                sequences[b], sequences[b].position + depth, growths[b].plan.width, candidate
            )

        grow(growths, children)
        return trees(growths)

    def _children(
        self, sequence: _Known, position: int, width: int, node: int
    ) -> tuple[list[int], list[float]]:
        if position >= len(sequence.reference):
            return [], []
        truth = sequence.reference[position]
        hit = random.Random(f"{self._seed} {position}").random() < self.right
        # Other ids, spread over the vocabulary; nodes of one level have different ones.
        turn = 7919 * (position + 31 * (node + 1))
        others = {(turn + i) % (self._vocab_size - 1) for i in range(width)}
        wrong = [(truth + 1 + other) % self._vocab_size for other in sorted(others)]
        tokens = [truth, *wrong][:width] if hit else wrong[:width]
        rest = max((1 - self.right) / (width + 1), 1e-4)
        chances = [max(self.right, 1e-4), *[rest] * (len(tokens) - 1)]
        return tokens, [log(chance) for chance in sorted(chances, reverse=True)]
