"""The growth of draft trees from a drafter's candidates, level by level and for a whole batch at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from stages.decoding.tree import MAX_EXPANDED, DraftTree, Path, Prices, TreePlan


class Confidence(Protocol):
    """What a drafter's probabilities have turned out to be worth."""

    def probability(self, depth: int, stated: float) -> float:
        """That a child of an accepted node is accepted, at ``depth`` (1: below the root), if the drafter
        says ``stated``."""

    def expected(self, depth: int, parent: float) -> Sequence[float]:
        """The same of each child, best first, before they are drafted, if their parent had the chance
        ``parent``."""


class AsStated:
    """Takes a drafter at its word."""

    def probability(self, depth: int, stated: float) -> float:
        return stated

    def expected(self, depth: int, parent: float) -> Sequence[float]:
        return (parent,)


class Outcome(NamedTuple):
    """What became of one candidate below an accepted node.

    stated: the drafter's probability of it; rank: its place among the node's children, from 0; parent: the
    probability that was given to the node itself, 1 at the root.
    """

    depth: int
    stated: float
    parent: float
    rank: int
    hit: bool


class TreeGrowth:
    """Collects candidates of one sequence and picks the best ones (EAGLE-2, sections 4.1 and 4.2).

    Candidates are ordered by the probability of their path. A child's is never above its parent's and ties go
    to the lower index, so the best candidates always form a tree.
    """

    def __init__(self, plan: TreePlan, root: int, confidence: Confidence | None = None) -> None:
        self.plan = plan
        self.root = root
        self._confidence = confidence or AsStated()
        self._tokens: list[int] = []
        self._parents: list[int] = []  # candidate index; -1 for children of the root
        self._reaches: list[float] = []  # chance that the whole path is accepted
        self._depths: list[int] = []
        self._stated: list[float] = []
        self._chances: list[float] = []  # what the confidence made of it
        self._ranks: list[Path] = []
        self._expanded: list[int] = []

    def add_children(self, parent: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Candidates below ``parent`` (a candidate index, -1 the root), best first."""
        reach = self._reaches[parent] if parent >= 0 else 1.0
        depth = self._depths[parent] + 1 if parent >= 0 else 1
        ranks = self._ranks[parent] if parent >= 0 else ()
        stated = [math.exp(min(log_prob, 0.0)) for log_prob in log_probs]
        chances = [self._confidence.probability(depth, word) for word in stated]
        count = len(tokens)
        self._tokens += tokens
        self._parents += [parent] * count
        self._reaches += [reach * chance for chance in chances]
        self._depths += [depth] * count
        self._stated += stated
        self._chances += chances
        self._ranks += [(*ranks, rank) for rank in range(count)]

    @property
    def candidates(self) -> int:
        return len(self._tokens)

    def token(self, candidate: int) -> int:
        return self._tokens[candidate]

    def parent(self, candidate: int) -> int:
        return self._parents[candidate]

    def depth(self, candidate: int) -> int:
        return self._depths[candidate]

    def score(self, candidate: int) -> float:
        """The log-probability of its path."""
        return log(self._reaches[candidate])

    def expand(self, candidates: Sequence[int]) -> None:
        """Note that the drafter has run on these."""
        self._expanded.extend(candidates)

    @property
    def capacity(self) -> int:
        """How many more nodes can be expanded: their ancestor words have 64 bits."""
        return MAX_EXPANDED - len(self._expanded)

    def frontier(self) -> list[int]:
        """Candidates to expand next, best first; empty when that would not pay.

        Nodes that cannot lead into the final tree are left out: a child is no more probable than its parent,
        so one behind the worst selected candidate has no descendant worth drafting.
        """
        plan = self.plan
        if plan.kind == "static":
            return [i for i in self._last_level() if self._has_child(self._ranks[i])][: self.capacity]
        open_ones = self._unexpanded() if plan.kind == "best" else self._last_level()
        chosen = set(self._best())
        best = sorted((i for i in open_ones if i in chosen), key=self._order)[
            : min(plan.width, self.capacity)
        ]
        if not best or self._reaches[best[0]] < plan.expand_prob:
            return []
        return best

    def _order(self, candidate: int) -> tuple[float, int]:
        return -self._reaches[candidate], candidate

    def _last_level(self) -> list[int]:
        """Candidates that the last pass brought, where they may have children."""
        if not self._depths or self._depths[-1] >= self.plan.depth:
            return []
        done = set(self._expanded)
        return [i for i, d in enumerate(self._depths) if d == self._depths[-1] and i not in done]

    def _unexpanded(self) -> list[int]:
        done = set(self._expanded)
        return [i for i, d in enumerate(self._depths) if d < self.plan.depth and i not in done]

    def _has_child(self, ranks: Path) -> bool:
        return any(len(path) == len(ranks) + 1 and path[:-1] == ranks for path in self.plan.paths)

    def _best(self) -> list[int]:
        """The best ``nodes`` candidates that are probable enough, ties by index."""
        if self.plan.kind == "static":
            return [i for i, ranks in enumerate(self._ranks) if ranks in self.plan.paths]
        worthy = [i for i, reach in enumerate(self._reaches) if reach >= self.plan.min_prob]
        return sorted(worthy, key=self._order)[: self.plan.nodes]

    def tree(self, chosen: Sequence[int] | None = None) -> DraftTree:
        """The tree of the best candidates, or of those given, parents first."""
        chosen = sorted(self._best() if chosen is None else chosen)
        place = {-1: 0} | {candidate: i + 1 for i, candidate in enumerate(chosen)}
        return DraftTree(
            (self.root, *(self._tokens[i] for i in chosen)),
            (-1, *(place[self._parents[i]] for i in chosen)),
            (0, *(self._depths[i] for i in chosen)),
        )

    def gain(self, candidate: int, node_price: float, level_price: float) -> float:
        """Tokens that expanding a candidate is expected to bring, less their price, the pass itself not
        counted; deeper levels count as far as they pay."""
        chance, total = self._reaches[candidate], 0.0
        last = self._chances[candidate]
        for depth in range(self._depths[candidate] + 1, self.plan.depth + 1):
            children = self._confidence.expected(depth, last)[: self.plan.width]
            net = -level_price if total else 0.0
            for child in children:
                worth = chance * child - node_price
                if worth > 0:
                    net += worth
            if net <= 0:
                break
            total += net
            last = children[0]
            chance *= last
        return total

    def path(self, truth: Sequence[int]) -> list[int]:
        """Candidates that the output, having gone on with ``truth``, has passed through; -1, the root,
        first."""
        nodes = [-1]
        for token in truth:
            match = [i for i in self._children(nodes[-1]) if self._tokens[i] == token]
            if not match:
                break
            nodes.append(match[0])
        return nodes

    def _children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self._parents) if parent == node]

    def outcomes(self, truth: Sequence[int]) -> list[Outcome]:
        """What became of the candidates, the output having gone on with ``truth``."""
        found: list[Outcome] = []
        for node, token in zip(self.path(truth), truth, strict=False):
            chance = self._chances[node] if node >= 0 else 1.0
            for rank, i in enumerate(self._children(node)):
                hit = self._tokens[i] == token
                found.append(Outcome(self._depths[i], self._stated[i], chance, rank, hit))
        return found


def log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def frontiers(growths: Sequence[TreeGrowth], *, passes: bool = True) -> list[list[int]]:
    """What to expand next in each tree of a batch; all empty when no tree is worth another pass.

    passes: whether a level takes one, or its candidates are known already.
    """
    chosen = [[] if growth.plan.prices is not None else growth.frontier() for growth in growths]
    priced = [b for b, growth in enumerate(growths) if growth.plan.prices is not None]
    if not priced:
        return chosen
    prices = growths[priced[0]].plan.prices
    assert prices is not None
    node_price = prices.marginal(sum(map(len, _cut(growths, priced, prices))))
    rows = prices.rows if passes else (0.0,) * len(prices.rows)
    level_price = rows[min(len(priced), len(rows) - 1)] / len(priced)
    gains = sorted(
        (-growths[b].gain(i, node_price, level_price), b, i) for b in priced for i in growths[b]._last_level()
    )
    taken: list[tuple[int, int]] = []
    room = {b: min(growths[b].plan.width, growths[b].capacity) for b in priced}
    total, best, best_count = 0.0, 0.0, 0
    for gain, b, i in gains:
        if gain >= 0 or len(taken) + 1 >= len(rows):
            break
        if room[b] == 0:
            continue
        room[b] -= 1
        taken.append((b, i))
        total -= gain
        if total - rows[len(taken)] > best:
            best, best_count = total - rows[len(taken)], len(taken)
    for b, i in taken[:best_count]:
        chosen[b].append(i)
    return chosen


Children = Callable[[int, int], tuple[Sequence[int], Sequence[float]]]
"""Tokens below a candidate (-1: the root) of the tree with this number, and their log-probabilities, best
first."""


def grow(growths: Sequence[TreeGrowth], children: Children) -> None:
    """Grow the trees of a batch from children that are all known: no level takes a pass."""
    expand = [[-1] if growth.plan.kind != "none" and growth.plan.depth > 0 else [] for growth in growths]
    while any(expand):
        for b, (growth, candidates) in enumerate(zip(growths, expand, strict=True)):
            growth.expand([candidate for candidate in candidates if candidate >= 0])
            for candidate in candidates:
                growth.add_children(candidate, *children(b, candidate))
        expand = frontiers(growths, passes=False)


def trees(growths: Sequence[TreeGrowth]) -> list[DraftTree]:
    """The trees to verify, those with prices cut together so that the batch gains most."""
    priced = [b for b, growth in enumerate(growths) if growth.plan.prices is not None]
    picked: dict[int, list[int]] = {}
    if priced:
        prices = growths[priced[0]].plan.prices
        assert prices is not None
        picked = dict(zip(priced, _cut(growths, priced, prices), strict=True))
    return [growth.tree(picked.get(b)) for b, growth in enumerate(growths)]


def _cut(growths: Sequence[TreeGrowth], priced: Sequence[int], prices: Prices) -> list[list[int]]:
    """The candidates of each priced tree whose chances, summed, exceed their price by most.

    Taken in the order of their chance over the whole batch, so that each tree's are connected.
    """
    ordered = sorted((-reach, b, i) for b in priced for i, reach in enumerate(growths[b]._reaches))
    room = {b: growths[b].plan.nodes for b in priced}
    taken: list[tuple[int, int]] = []
    total, best, best_count, most = 0.0, 0.0, 0, len(prices.nodes) - 1
    for negative, b, i in ordered:
        count = len(taken) + 1
        if count > most:
            break
        if room[b] == 0:
            continue
        room[b] -= 1
        taken.append((b, i))
        total -= negative
        gain = total - prices.nodes[count]
        if gain > best:
            best, best_count = gain, count
    chosen: dict[int, list[int]] = {b: [] for b in priced}
    for b, i in taken[:best_count]:
        chosen[b].append(i)
    return [chosen[b] for b in priced]
