"""Planning by cost: draft what is expected to raise tokens per second, and nothing where nothing does.

Time is priced in tokens: a second is worth the r tokens that the batch is known to put out in one, so a cycle
of B sequences that accepts a drafted tokens and takes t seconds more than a plain step gains

    a - r * t        tokens over plain decoding

(Dinkelbach's way of maximising tokens / time).

Two decisions follow from it. *Within a cycle* the price of verifying k nodes and of a drafter's pass over m
nodes (`Prices`) meets the calibrated chances of the candidates: levels are added and nodes kept as long as
they gain (`stages.decoding.growth`): a sure head goes deep, an unsure one stops at once. *Between cycles*
there is a `Habit`, of each sequence where it runs alone and else of the batch, which shares most of the cost:
while drafting has gained lately it goes on; when it has not, decoding is plain and drafting tried again
later, the waits doubling as trials fail. Where by the costs not even a sure draft would pay, a single node is
drafted now and then, so that a wrong table does not rule for good.

Costs are measured once (`stages.decoding.costs`), and corrected by every cycle's own times, so that a longer
context or a busier machine shifts the decisions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stages.decoding.costs import Costs
from stages.decoding.tree import DraftTree, Prices, TreeConfig, TreePlan

FIRST_WAIT, LONGEST_WAIT = 16, 256
"""Plain cycles a sequence of the batch before drafting is tried again, at first and at most. The drafter must
read what all of them hold before it can draft; of those that come and go meanwhile it reads nothing."""

PLAIN_FIRST, PLAIN_EVERY = 12, 256
"""Cycles after which a plain one is due, so that what it costs stays known; more and more of them."""

PRICES_HOLD = 8
"""Cycles for which prices are used."""

TRIAL = 8
"""Cycles that a trial takes, unless it is hopeless before."""

_MARGIN = 0.02
"""Tokens a cycle that drafting must gain to be taken up, or lose to be given up."""

_DOUBT = 0.5
"""Standard errors that drafting must lie below a plain step before it is given up."""

_SOONEST = 3
"""Cycles that are watched before that."""

_CAUTION = 1.1
"""What drafting in a batch must bring over its price: near break-even nothing is won, and a busy server
loses."""

_MEMORY = 48
_LONG_MEMORY = 200


@dataclass
class Decisions:
    """What was decided.

    cycles, drafting: sequence cycles in all, and those that drafted.
    trials: times that drafting was tried again; given_up: times that it was stopped.
    proposed, accepted: trees that had a level d, and those whose level d was accepted; by d.
    """

    cycles: int = 0
    drafting: int = 0
    trials: int = 0
    given_up: int = 0
    proposed: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)

    def count(self, tree: DraftTree, accepted: int) -> None:
        """A tree that was verified, and how many of its levels were accepted."""
        for level in range(1, max(tree.depths) + 1):
            self.proposed[level] += 1
        for level in range(1, accepted + 1):
            self.accepted[level] += 1

    def acceptance(self) -> list[float]:
        """The share of trees with a level that had it accepted, level by level."""
        return [self.accepted[d] / self.proposed[d] for d in sorted(self.proposed)]


class Planner(Protocol):
    """Says what each cycle may draft."""

    decisions: Decisions
    tree: TreeConfig
    """The tree asked for, or the bounds of what may be planned."""

    def start(self, slot: int) -> None:
        """A new sequence takes the slot."""

    def plan(self, slots: Sequence[int], left: Sequence[int]) -> list[TreePlan]:
        """For the next cycle of these sequences.

        Args:
            left: drafted tokens that each output has room for.
        """

    def observe(
        self,
        slots: Sequence[int],
        trees: Sequence[DraftTree],
        accepted: Sequence[int],
        draft_s: float,
        verify_s: float,
        passes: Sequence[int] = (),
    ) -> None:
        """What came of the last plan.

        Args:
            accepted: drafted tokens that entered each output.
            draft_s: of the drafter, its pass over what was verified before included.
            verify_s: of the target's forward and of choosing the tokens.
            passes: rows of each of the drafter's passes (``Drafter.passes``).
        """


class FixedPlanner:
    """The same tree every cycle, as far as the output has room for it."""

    def __init__(self, tree: TreeConfig) -> None:
        self.decisions = Decisions()
        self.tree = tree

    def start(self, slot: int) -> None:
        """Nothing is kept."""

    def plan(self, slots: Sequence[int], left: Sequence[int]) -> list[TreePlan]:
        return [self.tree.plan(room) for room in left]

    def observe(
        self,
        slots: Sequence[int],
        trees: Sequence[DraftTree],
        accepted: Sequence[int],
        draft_s: float,
        verify_s: float,
        passes: Sequence[int] = (),
    ) -> None:
        for tree, count in zip(trees, accepted, strict=True):
            self.decisions.cycles += 1
            self.decisions.drafting += self.tree.kind != "none"
            self.decisions.count(tree, count)


@dataclass
class Habit:
    """Whether a sequence drafts.

    gain: mean tokens that a drafting cycle has gained lately over a plain one; weight: cycles it rests on;
        variance: of the gains, a guess at first.
    tried: whether it has been given up before; then a trial must show a gain.
    until: the cycle at which drafting is tried again; wait: how many cycles a sequence lie between.
    """

    gain: float = 0.0
    weight: float = 0.0
    variance: float = 0.4
    drafting: bool = True
    tried: bool = False
    until: int = 0
    wait: int = FIRST_WAIT

    def learn(self, gain: float, memory: float) -> None:
        self.weight = min(self.weight + 1, memory)
        off = gain - self.gain
        self.gain += off / self.weight
        self.variance += (off * (gain - self.gain) - self.variance) / (self.weight + 4)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(self.variance / max(self.weight, 1.0))


class CostPlanner:
    """Plans by cost; see the module. One for all sequences of an engine."""

    def __init__(self, costs: Costs, limits: TreeConfig | None = None) -> None:
        """``limits``: a ``cost`` tree, whose numbers bound every plan."""
        self.costs = costs
        self.decisions = Decisions()
        self.tree = limits or TreeConfig.parse("cost")
        self._clock = 0
        self._common: dict[int, Habit] = {}  # of all sequences, by kind of batch
        self._rates: dict[int, _Rate] = {}
        self._alone: dict[int, Habit] = {}  # of sequences that run alone, by slot
        self._plain: dict[int, tuple[int, int]] = {}  # by kind of batch: the last one, and when one is due
        self._drafted: set[int] = set()
        self._probing = False
        self._probes: dict[int, tuple[int, int]] = {}  # by kind of batch: the next one, and the wait before
        self._made: dict[tuple[int, int], tuple[int, Prices]] = {}  # when, by batch and how many draft

    def start(self, slot: int) -> None:
        self._alone.pop(slot, None)

    def plan(self, slots: Sequence[int], left: Sequence[int]) -> list[TreePlan]:
        self._clock += 1
        batch = len(slots)
        at, every = self._plain.setdefault(_kind(batch), (self._clock, PLAIN_FIRST))
        due = self._clock - at >= every
        self._drafted = {
            slot
            for slot, room in zip(slots, left, strict=True)
            if not due and room > 0 and self._drafts(slot, batch)
        }
        self.decisions.cycles += batch
        if not self._drafted:
            return [TreePlan.none()] * batch
        prices = self._prices(batch, len(self._drafted))
        self._probing = all(price >= 0.999 * k for k, price in enumerate(prices.nodes))
        if self._probing:  # not even a sure draft would pay, if that is what it costs
            at, wait = self._probes.setdefault(_kind(batch), (self._clock + FIRST_WAIT, FIRST_WAIT))
            if self._clock < at:
                self._drafted = set()
                return [TreePlan.none()] * batch
            wait = min(2 * wait, LONGEST_WAIT)
            self._probes[_kind(batch)] = self._clock + wait * batch, wait
            prices = _PROBE
        self.decisions.drafting += len(self._drafted)
        limits = self.tree
        return [
            TreePlan("cost", min(limits.depth, room), limits.width, limits.nodes, prices=prices)
            if slot in self._drafted
            else TreePlan.none()
            for slot, room in zip(slots, left, strict=True)
        ]

    def observe(
        self,
        slots: Sequence[int],
        trees: Sequence[DraftTree],
        accepted: Sequence[int],
        draft_s: float,
        verify_s: float,
        passes: Sequence[int] = (),
    ) -> None:
        batch, nodes = len(slots), sum(tree.drafted for tree in trees)
        kind = _kind(batch)
        self.costs.observe(batch + nodes, verify_s, passes, draft_s)
        if not nodes:
            at, every = self._plain.get(kind, (self._clock, PLAIN_FIRST))
            longer = self._clock - at >= every
            self._plain[kind] = self._clock, min(every * 5 // 4, PLAIN_EVERY) if longer else every
        if not self._drafted or self._probing:
            return
        # By the tables, which all cycles have made: the times of this one alone say little. What waited to
        # be read, a prompt or what was decoded plainly, is no part of what drafting costs where it goes on.
        steady = min(passes[0], len(self._drafted) + sum(accepted)) if passes else 0
        plain, verify = self.costs.verify_s(batch), self.costs.verify_s(batch + nodes)
        draft = sum(map(self.costs.draft_s, [steady, *passes[1:]] if passes else []))
        rate = self._rates.setdefault(kind, _Rate())
        rate.learn(batch + sum(accepted), draft + verify)
        gain = sum(accepted) - _caution(batch) * (draft + verify - plain) * batch / plain
        common = self._of_batch(kind)
        for slot, tree, count in zip(slots, trees, accepted, strict=True):
            if slot in self._drafted:
                self.decisions.count(tree, count)
        if batch == 1:
            common.learn(gain, _LONG_MEMORY)
            self._judge(self._alone[slots[0]], gain, common, 1)
        else:
            self._judge(common, gain / len(self._drafted), common, batch)

    def _drafts(self, slot: int, batch: int) -> bool:
        """Whether the sequence drafts in this cycle."""
        if batch > 1:
            return self._awake(self._of_batch(_kind(batch)))
        if slot not in self._alone:
            self._alone[slot] = self._begin()
        return self._awake(self._alone[slot])

    def _of_batch(self, kind: int) -> Habit:
        """Where a smaller batch has given drafting up, a larger one, to whom its nodes are dearer, begins
        with that."""
        if kind not in self._common:
            smaller = [habit for k, habit in self._common.items() if 0 < k < kind and not habit.drafting]
            wait = max((habit.wait for habit in smaller), default=0)
            self._common[kind] = (
                Habit(drafting=False, tried=True, until=self._clock + (wait << kind), wait=wait)
                if wait
                else Habit()
            )
        return self._common[kind]

    def _awake(self, habit: Habit) -> bool:
        if not habit.drafting and self._clock >= habit.until:
            self.decisions.trials += 1
            habit.drafting = True
            habit.gain, habit.weight = 0.0, 0.0
        return habit.drafting

    def _begin(self) -> Habit:
        """Of a new sequence that runs alone: what others have found is an example to it."""
        common = self._common.get(0)
        if common is None or common.weight < TRIAL:
            return Habit()
        if common.gain > -_MARGIN:
            return Habit(common.gain, min(common.weight, 4.0))
        return Habit(drafting=False, tried=True, until=self._clock + FIRST_WAIT, wait=common.wait)

    def _judge(self, habit: Habit, gain: float, common: Habit, batch: int) -> None:
        """Learn a gain, and give drafting up where it does not pay."""
        habit.learn(gain, _MEMORY)
        # Doubt is for drafting at first: a few cycles without luck say little.
        lost = habit.weight >= _SOONEST and habit.gain < -_DOUBT * habit.error
        lost |= habit.gain < -_MARGIN and common.gain < -_MARGIN and common.weight > _MEMORY
        lost |= habit.tried and habit.weight == TRIAL and habit.gain < _MARGIN
        if lost:
            self.decisions.given_up += 1
            habit.drafting, habit.tried = False, True
            habit.until = self._clock + habit.wait * batch
            habit.wait = min(habit.wait * 2, LONGEST_WAIT)
            common.wait = max(common.wait, habit.wait)
        elif habit.weight > TRIAL and habit.gain > _MARGIN:
            habit.wait = common.wait = FIRST_WAIT

    def _prices(self, batch: int, drafting: int) -> Prices:
        """Made anew every few cycles: costs change slowly."""
        made, prices = self._made.get((batch, drafting), (-PRICES_HOLD, None))
        if prices is None or self._clock - made >= PRICES_HOLD:
            prices = self._priced(batch, drafting)
            self._made[batch, drafting] = self._clock, prices
        return prices

    def _priced(self, batch: int, drafting: int) -> Prices:
        plain = self.costs.verify_s(batch)
        rate = self._rates.get(_kind(batch))
        worth = max(batch / plain, rate.tokens_per_s if rate else 0.0)
        worth *= _caution(batch)
        most = drafting * self.tree.nodes
        nodes = [worth * (self.costs.verify_s(batch + k) - plain) for k in range(most + 1)]
        rows = [worth * self.costs.draft_s(r) for r in range(1, drafting * self.tree.width + 1)]
        return Prices(tuple(nodes), (0.0, *rows))


@dataclass
class _Rate:
    """Tokens a second of drafting cycles; old ones fade."""

    tokens: float = 0.0
    seconds: float = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        fade = 1 - 1 / _MEMORY
        self.tokens, self.seconds = fade * self.tokens + tokens, fade * self.seconds + seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


_PROBE = Prices((0.0, 0.0), (0.0,))
"""A single node, to see what it costs."""


def _caution(batch: int) -> float:
    return _CAUTION if batch > 1 else 1.0


def _kind(batch: int) -> int:
    """Batches of like size share what is learned: 1, 2, 3-4, 5-8, 9-16, ..."""
    return (batch - 1).bit_length()
