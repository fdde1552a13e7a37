"""Drafting token by token with a model of its own state: what EAGLE heads and draft models have in common.

For each sequence the drafter keeps one stable row a verified token in its cache, made of true inputs; the
rows of drafted nodes lie behind and are overwritten. Verified tokens are not run when they come but when the
next tree is asked for, so that plain decoding in between costs nothing, and all that waits is one pass over
all sequences. A cycle is then

    pass over what was verified -> candidates below the root
    pass over the nodes worth expanding, of all sequences -> candidates below them      (until none is)
    the best candidates -> trees
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stages.decoding.drafters.calibration import Calibrations
from stages.decoding.drafters.drafter import Slots, StateKind
from stages.decoding.drafters.one_op import Grown
from stages.decoding.drafters.ranking import Node, Ranking
from stages.decoding.drafters.rows import DraftRows, Run
from stages.decoding.growth import TreeGrowth, frontiers, trees
from stages.decoding.row_tensors import PlacedRows
from stages.decoding.sampling import SamplingParams
from stages.decoding.tree import DraftTree, TreePlan, bit
from stages.targets import SlotCache
from stages.targets.inference import inference

MOST_WAITING = 512
"""Verified tokens of a sequence that may wait; states of the target are large."""

_RULED_OUT = -1e4
"""In the place of a logit: next to no chance, and yet a number."""

LEAST_SCORE = -1e3
"""A log-probability from here on down is no candidate's; that of what is ruled out lies there. Nor is NaN."""


@dataclass
class Followed:
    """One sequence as its drafter knows it.

    length: stable rows in the cache.
    waiting, states: verified tokens that have not been run, and the target's states that go with them.
    state: the drafter's own state [h] after the last stable row, as a row of states [N, h].
    prompt: verified tokens that will still be the prompt's; output: those behind it, for a token mask.
    growth, nodes: of the last tree; the nodes whose children were ranked, -1 the root.
    grown: the last tree in their place, where one op has drafted it.
    """

    params: SamplingParams
    root: int
    waiting: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    length: int = 0
    state: tuple[Tensor, int] | None = None
    prompt: int = 0
    output: list[int] = field(default_factory=list)
    growth: TreeGrowth | None = None
    nodes: dict[int, Node] = field(default_factory=dict)
    grown: Grown | None = None


@dataclass
class _Drafting:
    """One sequence within a cycle: where each expanded candidate's row and state are."""

    slot: int
    sequence: Followed
    growth: TreeGrowth
    words: dict[int, int] = field(default_factory=lambda: {-1: 0})
    places: dict[int, int] = field(default_factory=dict)  # candidate -> row among all states of the cycle

    @property
    def stored(self) -> int:
        """Drafted rows behind the stable ones."""
        return len(self.words) - 1

    def path(self, candidate: int) -> list[int]:
        """The drafted tokens from below the root to a candidate, -1 the root."""
        tokens: list[int] = []
        while candidate >= 0:
            tokens.insert(0, self.growth.token(candidate))
            candidate = self.growth.parent(candidate)
        return tokens

    def add(self, candidates: Sequence[int]) -> tuple[int, ...]:
        """Give the candidates the next rows; returns their ancestor words."""
        for candidate in candidates:
            self.words[candidate] = self.words[self.growth.parent(candidate)] | bit(self.stored)
        self.growth.expand(candidates)
        return tuple(self.words[candidate] for candidate in candidates)


class GrowingDrafter(ABC):
    """Grows trees level by level; subclasses run their model in ``_run`` and score its states in ``_logits``.

    calibrations: of the probabilities, used by trees with prices.
    ranking: of the children of a node.
    """

    state: StateKind = "none"
    lag = 0
    """Positions between a stable row and the token it holds: 1 where row i holds token i + 1."""

    def __init__(self, cache: SlotCache, draft_ids: Tensor, calibrations: Calibrations | None = None) -> None:
        self.calibrations = calibrations or Calibrations()
        self.passes: list[int] = []
        self.rows: PlacedRows | None = None
        self.ranking = Ranking(draft_ids, self.calibrations)
        self.cache = cache
        self._sequences: Slots[Followed] = Slots()

    def start(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        known: int = 0,
        source: int | None = None,
    ) -> None:
        if not known:
            waiting = list(prompt_ids[: 1 - self.lag])
            sequence = Followed(params, prompt_ids[0], waiting, prompt=len(prompt_ids) - 1)
            self._sequences.put(slot, sequence)
            return
        source = slot if source is None else source
        last, rows = self._sequences[source], known + 1 - self.lag
        length = min(last.length, rows)
        # Of those that wait the target's states do too, unless the drafter wants none.
        waiting = last.waiting[: rows - length]
        states = [torch.cat(last.states)[: len(waiting)]] if waiting and last.states else []
        if source != slot:
            self.cache.copy(source, slot, length)
        left = len(prompt_ids) - 1 - known
        self._sequences.put(slot, Followed(params, prompt_ids[known], waiting, states, length, prompt=left))

    @inference
    def extend(self, slots: Sequence[int], states: Tensor | None, tokens: Sequence[Sequence[int]]) -> None:
        begin = 0
        for slot, new in zip(slots, tokens, strict=True):
            sequence = self._sequences[slot]
            temperature = sequence.params.temperature
            if sequence.grown is not None:
                sequence.grown.learn(self.ranking, self.calibrations, temperature, new)
            elif sequence.growth is not None:
                self.ranking.learn(temperature, sequence.growth, sequence.nodes, new)
            sequence.growth = sequence.grown = None
            sequence.waiting.extend(new)
            if sequence.params.token_mask is not None:
                sequence.output.extend(new[sequence.prompt :])
            sequence.prompt = max(0, sequence.prompt - len(new))
            sequence.root = new[-1]
            if states is not None:
                whole = len(new) == len(states)
                sequence.states.append(states if whole else states[begin : begin + len(new)])
            begin += len(new)
        if long := [slot for slot in slots if len(self._sequences[slot].waiting) >= MOST_WAITING]:
            self._catch_up(long)

    @inference
    def hand_over(self, slot: int) -> Tensor:
        """The model's state [h] behind the last verified token, for one who goes on with this cache: of the
        slot's rows, those of verified tokens stay as they are."""
        if self._sequences[slot].waiting:
            self._catch_up([slot])
        return _known(self._sequences[slot].state)

    def take_back(self, slot: int, length: int) -> None:
        """Whoever went on has left so many rows; the sequence itself has ended."""
        sequence = self._sequences[slot]
        sequence.length, sequence.state = length, None

    @inference
    def propose(self, slots: Sequence[int], plans: Sequence[TreePlan]) -> list[DraftTree]:
        self.passes, self.rows = [], None
        asked = [b for b, plan in enumerate(plans) if plan.kind != "none" and plan.depth > 0]
        if len(asked) == len(slots):
            return self._grow(slots, plans)
        some = self._grow([slots[b] for b in asked], [plans[b] for b in asked])
        self.rows = None  # of all trees, or none
        grown = dict(zip(asked, some, strict=True))
        return [
            grown[b] if b in grown else DraftTree.root_only(self._sequences[slot].root)
            for b, slot in enumerate(slots)
        ]

    def _grow(self, slots: Sequence[int], plans: Sequence[TreePlan]) -> list[DraftTree]:
        if not slots:
            return []
        self._catch_up([slot for slot in slots if self._sequences[slot].waiting])
        drafts = []
        for slot, plan in zip(slots, plans, strict=True):
            sequence = self._sequences[slot]
            confidence = self.calibrations.at(sequence.params.temperature) if plan.prices else None
            sequence.growth, sequence.nodes = TreeGrowth(plan, sequence.root, confidence), {}
            sequence.grown = None
            drafts.append(_Drafting(slot, sequence, sequence.growth))
        passed = [torch.stack([_known(draft.sequence.state) for draft in drafts])]  # [rows, h] of each pass
        for row, draft in enumerate(drafts):
            draft.places[-1] = row
        width = max(plan.width for plan in plans)
        self._branch([(draft, -1) for draft in drafts], passed[0], width)
        while any(levels := frontiers([draft.growth for draft in drafts])):
            nodes = [(d, c) for d, level in zip(drafts, levels, strict=True) for c in level]
            runs: list[Run] = []
            for draft, level in zip(drafts, levels, strict=True):
                if level:
                    begin = runs[-1].end if runs else 0
                    length, stored = draft.sequence.length, draft.stored
                    runs.append(
                        Run(draft.slot, begin, begin + len(level), length, draft.add(level), offset=stored)
                    )
            parents = [draft.places[draft.growth.parent(candidate)] for draft, candidate in nodes]
            self.passes.append(len(nodes))
            rows = DraftRows.of(
                self.cache,
                runs,
                [draft.growth.token(candidate) for draft, candidate in nodes],
                # The children of the root stand one position behind the stable rows.
                [draft.sequence.length + draft.growth.depth(candidate) - 1 for draft, candidate in nodes],
            )
            fresh = self._run(_joined(passed, parents), rows)
            for row, (draft, candidate) in enumerate(nodes, start=sum(map(len, passed))):
                draft.places[candidate] = row
            passed.append(fresh)
            self._branch(nodes, fresh, width)
        return trees([draft.growth for draft in drafts])

    def _catch_up(self, slots: Sequence[int]) -> None:
        """Make stable rows of the verified tokens that wait."""
        if not slots:
            return
        sequences = [self._sequences[slot] for slot in slots]
        runs: list[Run] = []
        for slot, sequence in zip(slots, sequences, strict=True):
            begin = runs[-1].end if runs else 0
            runs.append(Run(slot, begin, begin + len(sequence.waiting), sequence.length))
        self.passes.append(runs[-1].end)
        given = [states for sequence in sequences for states in sequence.states]
        tokens = [t for sequence in sequences for t in sequence.waiting]
        positions = [p for run in runs for p in range(run.length, run.size)]
        rows = DraftRows.of(self.cache, runs, tokens, positions)
        hidden = self._take_in(_joined(given) if given else None, rows)
        for run, sequence in zip(runs, sequences, strict=True):
            sequence.state = hidden, run.end - 1
            sequence.length = run.size
            sequence.waiting, sequence.states = [], []

    def _branch(self, nodes: Sequence[tuple[_Drafting, int]], states: Tensor, width: int) -> None:
        """Add the most probable children of each node, from its state in states [R, h]; ``width``: of the
        widest tree of the cycle."""
        ranked = []
        for draft, candidate in nodes:
            depth = draft.growth.depth(candidate) + 1 if candidate >= 0 else 1
            sequence = draft.sequence
            node = Node(sequence.params, sequence.length + self.lag + depth - 1, depth)
            sequence.nodes[candidate] = node
            ranked.append(node)
        logits = self._logits(states)
        self._rule_out(nodes, logits)
        children = self.ranking.children(ranked, logits, width)
        for (draft, candidate), (tokens, scores) in zip(nodes, children, strict=True):
            best = [score for score in scores[: draft.growth.plan.width] if score > LEAST_SCORE]
            draft.growth.add_children(candidate, tokens[: len(best)], best)

    def _rule_out(self, nodes: Sequence[tuple[_Drafting, int]], logits: Tensor) -> None:
        """Leave no chance, in logits [R, Vd], to tokens that a sequence's own mask does not let follow.

        Under a schema the target draws none of them, and few may follow, so that a head that has never seen
        such text still guesses well.
        """
        for i, (draft, candidate) in enumerate(nodes):
            mask = draft.sequence.params.token_mask
            if mask is not None:
                row = logits[i]
                allowed = mask([*draft.sequence.output, *draft.path(candidate)])
                allowed = allowed.to(row.device)[self.ranking.draft_ids]
                if bool(allowed.any()):
                    row.masked_fill_(~allowed, _RULED_OUT)

    @abstractmethod
    def _take_in(self, states: Tensor | None, rows: DraftRows) -> Tensor:
        """Run M verified tokens; states [M, w] are the target's."""

    @abstractmethod
    def _run(self, parents: Tensor, rows: DraftRows) -> Tensor:
        """Run M drafted tokens below nodes with the states parents [M, h]: their own states [M, h]."""

    @abstractmethod
    def _logits(self, states: Tensor) -> Tensor:
        """Scores over the draft vocabulary [R, Vd]."""


def _joined(parts: Sequence[Tensor], rows: Sequence[int] | None = None) -> Tensor:
    """The rows [M, w] of all parts, or some of them; what needs no copying is not copied."""
    if rows is not None:
        before = sum(map(len, parts[:-1]))
        if min(rows) >= before:
            parts, rows = parts[-1:], [row - before for row in rows]
    whole = parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
    return whole if rows is None or list(rows) == list(range(len(whole))) else whole[rows]


def _known(state: tuple[Tensor, int] | None) -> Tensor:
    assert state is not None, "a tree was asked for before the first verified token"
    states, row = state
    return states[row]
