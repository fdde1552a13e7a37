"""Drafting with Medusa heads (arXiv 2401.10774): all levels of a tree from the target's last state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stages.decoding.drafters.calibration import Calibrations
from stages.decoding.drafters.drafter import Slots, StateKind
from stages.decoding.drafters.ranking import Node, Ranking
from stages.decoding.growth import TreeGrowth, grow, trees
from stages.decoding.row_tensors import PlacedRows
from stages.decoding.sampling import SamplingParams
from stages.decoding.tree import DraftTree, TreePlan
from stages.heads import MedusaHead
from stages.targets.inference import inference


@dataclass
class _Followed:
    """position: of the root."""

    params: SamplingParams
    root: int
    position: int = 0
    state: Tensor | None = None
    growth: TreeGrowth | None = None
    nodes: dict[int, Node] = field(default_factory=dict)


class MedusaDrafter:
    """Head k guesses the token k + 1 behind the root, whatever stands between: the children of all nodes of a
    level are the same, and a path is worth the product of its tokens' probabilities."""

    state: StateKind = "last"
    cache = None

    def __init__(self, head: MedusaHead, *, calibrations: Calibrations | None = None) -> None:
        self.head = head
        self.passes: list[int] = []
        self.rows: PlacedRows | None = None
        self.calibrations = calibrations or Calibrations()
        self._ranking = Ranking(head.draft_ids, self.calibrations)
        self._sequences: Slots[_Followed] = Slots()

    def start(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        known: int = 0,
        source: int | None = None,
    ) -> None:
        self._sequences.put(slot, _Followed(params, prompt_ids[known], position=known))

    def extend(self, slots: Sequence[int], states: Tensor | None, tokens: Sequence[Sequence[int]]) -> None:
        assert states is not None, "Medusa heads need the target's states"
        end = 0
        for slot, new in zip(slots, tokens, strict=True):
            sequence = self._sequences[slot]
            if sequence.growth is not None:
                self._ranking.learn(sequence.params.temperature, sequence.growth, sequence.nodes, new)
            end += len(new)
            sequence.growth, sequence.root, sequence.state = None, new[-1], states[end - 1]
            sequence.position += len(new)

    @inference
    def propose(self, slots: Sequence[int], plans: Sequence[TreePlan]) -> list[DraftTree]:
        sequences = [self._sequences[slot] for slot in slots]
        for sequence, plan in zip(sequences, plans, strict=True):
            confidence = self.calibrations.at(sequence.params.temperature) if plan.prices else None
            plan = plan.cut(self.head.config.heads)
            sequence.growth, sequence.nodes = TreeGrowth(plan, sequence.root, confidence), {}
        drafting = [
            s for s, plan in zip(sequences, plans, strict=True) if plan.kind != "none" and plan.depth > 0
        ]
        self.passes = [len(drafting)] if drafting else []
        if drafting:
            self._grow(drafting)
        return trees([_growth(sequence) for sequence in sequences])

    def _grow(self, sequences: Sequence[_Followed]) -> None:
        growths = [_growth(sequence) for sequence in sequences]
        dtype = next(self.head.parameters()).dtype
        states = torch.stack([s.state for s in sequences if s.state is not None]).to(dtype)
        logits = self.head.logits(self.head(states))  # [K, B, Vd]
        deepest = max(growth.plan.depth for growth in growths)
        levels = [
            Node(sequence.params, sequence.position + depth, depth)
            for depth in range(1, deepest + 1)
            for sequence in sequences
        ]
        width = max(growth.plan.width for growth in growths)
        ranked = self._ranking.children(levels, logits[:deepest].flatten(0, 1), width)

        def children(b: int, candidate: int) -> tuple[list[int], list[float]]:
            growth = growths[b]
            row = (growth.depth(candidate) if candidate >= 0 else 0) * len(growths) + b
            sequences[b].nodes[candidate] = levels[row]
            tokens, scores = ranked[row]
            return tokens[: growth.plan.width], scores[: growth.plan.width]

        grow(growths, children)


def _growth(sequence: _Followed) -> TreeGrowth:
    assert sequence.growth is not None
    return sequence.growth
