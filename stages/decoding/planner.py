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

Costs are measured once (`stages.decoding.measure`), and corrected by every cycle's own times
(`stages.decoding.costs`), so that a longer context or a busier machine shifts the decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from stages.decoding.costs import Costs
from stages.decoding.habit import FIRST_WAIT, MEMORY, Habit, Rate, Wait
from stages.decoding.tree import DraftTree, Prices, TreeConfig, TreePlan

PLAIN_FIRST = 12
"""Cycles after which a plain one is due, at first, so that what it costs stays known."""

PRICES_HOLD, MOST_PRICES = 8, 64
"""Cycles for which prices are used, and batches of which they are kept."""

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

TAKEN_IN = 4
"""Cycles that are looked at together while drafting pays. What Python costs between forwards is its empty
caches: the second look in a row takes a tenth of the first."""

_LONG_MEMORY = 200
"""Cycles after which older ones fade, for what all sequences that ran alone have found."""


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


class Cycle(NamedTuple):
    """What came of a plan.

    slots, trees: of the sequences that it was made for.
    accepted: drafted tokens that entered each output.
    draft_s: of the drafter, its pass over what was verified before included.
    verify_s: of the target's forward and of choosing the tokens.
    passes: rows of each of the drafter's passes (``Drafter.passes``).
    beside: sequences of the batch that never draft.
    """

    slots: Sequence[int]
    trees: Sequence[DraftTree]
    accepted: Sequence[int]
    draft_s: float
    verify_s: float
    passes: Sequence[int] = ()
    beside: int = 0


class Planner(Protocol):
    """Says what each cycle may draft."""

    tree: TreeConfig
    """The tree asked for, or the bounds of what may be planned."""

    @property
    def decisions(self) -> Decisions:
        """So far."""

    def start(self, slot: int) -> None:
        """A new sequence takes the slot."""

    def plan(self, slots: Sequence[int], left: Sequence[int], beside: int = 0) -> list[TreePlan]:
        """For the next cycle of these sequences.

        Args:
            left: drafted tokens that each output has room for.
            beside: sequences of the batch that never draft.
        """

    def observe(self, cycle: Cycle) -> None:
        """What came of the last plan."""


class FixedPlanner:
    """The same tree every cycle, as far as the output has room for it."""

    def __init__(self, tree: TreeConfig) -> None:
        self.decisions = Decisions()
        self.tree = tree

    def start(self, slot: int) -> None:
        """Nothing is kept."""

    def plan(self, slots: Sequence[int], left: Sequence[int], beside: int = 0) -> list[TreePlan]:
        return [self.tree.plan(room) for room in left]

    def observe(self, cycle: Cycle) -> None:
        for tree, count in zip(cycle.trees, cycle.accepted, strict=True):
            self.decisions.cycles += 1
            self.decisions.drafting += self.tree.kind != "none"
            self.decisions.count(tree, count)


class CostPlanner:
    """Plans by cost; see the module. One for all sequences of an engine."""

    def __init__(self, costs: Costs, limits: TreeConfig | None = None) -> None:
        """``limits``: a ``cost`` tree, whose numbers bound every plan."""
        self.costs = costs
        self.tree = limits or TreeConfig.parse("cost")
        self._decisions = Decisions()
        self._clock = 0
        self._seen: list[_Seen] = []
        self._together = 1  # of them, so many are looked at together
        self._kinds: dict[int, _Kind] = {}
        self._alone: dict[int, Habit] = {}  # of sequences that run alone, by slot
        self._drafted: set[int] = set()
        self._probing = False
        self._made: dict[tuple[int, int], tuple[int, Prices]] = {}  # when, by batch and how many draft
        self._plans: tuple[Prices, dict[int, TreePlan]] = (_PROBE, {})  # by depth, of the last prices

    @property
    def decisions(self) -> Decisions:
        self._take_in()
        return self._decisions

    def start(self, slot: int) -> None:
        self._take_in()
        self._alone.pop(slot, None)

    def plan(self, slots: Sequence[int], left: Sequence[int], beside: int = 0) -> list[TreePlan]:
        self._clock += 1
        batch = len(slots) + beside
        kind = self._kind(batch)
        plain = kind.plain.over(self._clock)
        self._drafted = {
            slot
            for slot, room in zip(slots, left, strict=True)
            if not plain and room > 0 and self._drafts(slot, batch)
        }
        self._decisions.cycles += len(slots)
        if not self._drafted:
            return [_NONE] * len(slots)
        prices = self._prices(batch, len(self._drafted))
        self._probing = all(price >= 0.999 * k for k, price in enumerate(prices.nodes))
        if self._probing:  # not even a sure draft would pay, if that is what it costs
            kind.rate = Rate()  # the machine may have become slower since
            if not kind.probe.cycles:
                kind.probe.begin(self._clock)
            if not kind.probe.over(self._clock):
                self._drafted = set()
                return [_NONE] * len(slots)
            kind.probe.begin(self._clock, batch)
            prices = _PROBE
        self._decisions.drafting += len(self._drafted)
        return [
            self._plan(min(self.tree.depth, room), prices) if slot in self._drafted else _NONE
            for slot, room in zip(slots, left, strict=True)
        ]

    def _plan(self, depth: int, prices: Prices) -> TreePlan:
        """Kept, as most cycles have the same."""
        if self._plans[0] is not prices:
            self._plans = prices, {}
        known = self._plans[1]
        if depth not in known:
            known[depth] = TreePlan("cost", depth, self.tree.width, self.tree.nodes, prices=prices)
        return known[depth]

    def observe(self, cycle: Cycle) -> None:
        self._seen.append(_Seen(cycle, self._drafted, self._probing))
        drafted = any(tree.drafted for tree in cycle.trees)
        if not drafted:
            self._kind(len(cycle.slots) + cycle.beside).plain.begin(self._clock)
        if len(self._seen) >= self._together or not drafted:
            self._take_in()

    def _take_in(self) -> None:
        """Learn from the cycles that have been seen."""
        seen, self._seen = self._seen, []
        for one in seen:
            self._learn(*one)

    def _learn(self, cycle: Cycle, drafted: set[int], probing: bool) -> None:
        slots, trees, accepted, draft_s, verify_s, passes, beside = cycle
        batch, nodes = len(slots) + beside, sum(tree.drafted for tree in trees)
        self.costs.observe(batch + nodes, verify_s, passes, draft_s)
        if not drafted or probing:
            return
        # By the tables, which all cycles have made: the times of this one alone say little. What waited to
        # be read, a prompt or what was decoded plainly, is no part of what drafting costs where it goes on.
        steady = min(passes[0], len(drafted) + sum(accepted)) if passes else 0
        plain, verify = self.costs.verify_s(batch), self.costs.verify_s(batch + nodes)
        draft = sum(map(self.costs.draft_s, [steady, *passes[1:]] if passes else []))
        kind = self._kind(batch)
        kind.rate.learn(batch + sum(accepted), draft + verify)
        gain = sum(accepted) - _caution(batch) * (draft + verify - plain) * batch / plain
        common = kind.habit
        for slot, tree, count in zip(slots, trees, accepted, strict=True):
            if slot in drafted:
                self._decisions.count(tree, count)
        if batch == 1:
            common.learn(gain, _LONG_MEMORY)
            self._judge(self._alone[slots[0]], gain, common, 1)
        else:
            self._judge(common, gain / len(drafted), common, batch)

    def _drafts(self, slot: int, batch: int) -> bool:
        """Whether the sequence drafts in this cycle."""
        if batch > 1:
            return self._awake(self._kind(batch).habit)
        if slot not in self._alone:
            self._alone[slot] = self._begin()
        return self._awake(self._alone[slot])

    def _kind(self, batch: int) -> _Kind:
        """Batches of like size share what is learned: 1, 2, 3-4, 5-8, 9-16, ...

        Where a smaller one has given drafting up, a larger one, to whom its nodes are dearer, begins with
        that.
        """
        kind = (batch - 1).bit_length()
        if kind not in self._kinds:
            smaller = [self._kinds[k].habit for k in self._kinds if 0 < k < kind]
            longest = max((habit.wait.cycles for habit in smaller if not habit.drafting), default=0)
            habit = Habit(drafting=not longest, tried=longest > 0)
            if longest:
                habit.wait = Wait(cycles=longest)
                habit.wait.begin(self._clock, 1 << kind)
                habit.wait.cycles = longest  # it counts as theirs
            self._kinds[kind] = _Kind(habit)
            self._kinds[kind].plain.begin(self._clock)
        return self._kinds[kind]

    def _awake(self, habit: Habit) -> bool:
        if not habit.drafting and habit.wait.over(self._clock):
            self._decisions.trials += 1
            habit.drafting = True
            habit.gain, habit.weight = 0.0, 0.0
        return habit.drafting

    def _begin(self) -> Habit:
        """Of a new sequence that runs alone: what others have found is an example to it."""
        common = self._kind(1).habit
        if common.weight < TRIAL:
            return Habit()
        if common.gain > -_MARGIN:
            return Habit(common.gain, min(common.weight, 4.0))
        until = min(self._clock + FIRST_WAIT, common.wait.until)
        wait = Wait(cycles=common.wait.cycles, until=until)
        return Habit(drafting=False, tried=True, wait=wait)

    def _judge(self, habit: Habit, gain: float, common: Habit, batch: int) -> None:
        """Learn a gain, and give drafting up where it does not pay."""
        habit.learn(gain, MEMORY)
        pays = habit.weight > TRIAL and habit.gain > _MARGIN
        self._together = TAKEN_IN if pays else 1
        if not habit.drafting:
            return  # given up by an earlier one of those that are looked at together
        # Doubt is for drafting at first: a few cycles without luck say little.
        lost = habit.weight >= _SOONEST and habit.gain < -_DOUBT * habit.error
        # Of a sequence that runs alone, when the others have found no gain either:
        lost |= habit.gain < -_MARGIN and common.gain < -_MARGIN and common.weight > MEMORY
        lost |= habit.tried and habit.weight == TRIAL and habit.gain < _MARGIN
        if lost:
            self._decisions.given_up += 1
            habit.drafting, habit.tried = False, True
            habit.wait.begin(self._clock, batch)
            common.wait.cycles = max(common.wait.cycles, habit.wait.cycles)
            common.wait.until = habit.wait.until
        elif pays:
            habit.wait.cycles = common.wait.cycles = 0

    def _prices(self, batch: int, drafting: int) -> Prices:
        """Made anew every few cycles: costs change slowly."""
        made, prices = self._made.get((batch, drafting), (-PRICES_HOLD, None))
        if prices is None or self._clock - made >= PRICES_HOLD:
            if len(self._made) > MOST_PRICES:
                self._made.clear()
            prices = self._priced(batch, drafting)
            self._made[batch, drafting] = self._clock, prices
        return prices

    def _priced(self, batch: int, drafting: int) -> Prices:
        plain = self.costs.verify_s(batch)
        worth = max(batch / plain, self._kind(batch).rate.tokens_per_s) * _caution(batch)
        most = drafting * self.tree.nodes
        nodes = [worth * (self.costs.verify_s(batch + k) - plain) for k in range(most + 1)]
        rows = [worth * self.costs.draft_s(r) for r in range(1, drafting * self.tree.width + 1)]
        return Prices(tuple(nodes), (0.0, *rows))


class _Seen(NamedTuple):
    """A cycle that is still to be learned from, and what had been planned for it."""

    cycle: Cycle
    drafted: set[int]
    probing: bool


@dataclass
class _Kind:
    """What is known of batches of like size.

    plain: until a plain cycle is due; probe: until a node is drafted though by the costs none pays.
    """

    habit: Habit
    rate: Rate = field(default_factory=Rate)
    plain: Wait = field(default_factory=lambda: Wait(PLAIN_FIRST, 1.25))
    probe: Wait = field(default_factory=Wait)


_PROBE = Prices((0.0, 0.0), (0.0,))
"""A single node, to see what it costs."""

_NONE = TreePlan.none()


def _caution(batch: int) -> float:
    return _CAUTION if batch > 1 else 1.0
