"""Draft trees: their settings, what one cycle may draft, and their growth from a drafter's candidates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from stages.errors import EagleError

MAX_DRAFTED = 63  # ancestor words have 64 bits, one of them the root's
MAX_EXPANDED = 64

TreeKind = Literal["none", "chain", "static", "dynamic", "best", "cost"]
Path = tuple[int, ...]
"""A node of a static tree: the rank of each child on the way from the root, 0 the most probable."""

_SETTINGS: dict[str, set[str]] = {
    "none": set(),
    "chain": {"depth", "min_prob", "expand_prob"},
    "static": set(),
    "dynamic": {"depth", "width", "nodes", "min_prob", "expand_prob"},
    "best": {"depth", "width", "nodes", "min_prob"},
    "cost": {"depth", "width", "nodes"},
}
_EXAMPLES = (
    "none, chain:depth=3, static:0,1,0.0,0.0.0, dynamic:depth=6,width=4,nodes=12, best:nodes=8 or cost"
)


@dataclass(frozen=True)
class TreeConfig:
    """How trees are grown.

    kind: ``none`` (plain decoding), ``chain`` (one candidate a level), ``static`` (a fixed list of paths),
        ``dynamic`` (EAGLE-2, arXiv 2406.16858: level by level, then the best of all), ``best`` (best first: a
        level of the head goes to the most probable nodes wherever they are) or ``cost`` (what measured costs
        and observed acceptance make worth drafting; the numbers are limits then).
    depth: levels drafted at most.
    width: nodes expanded a level, and children tried for each.
    nodes: drafted nodes verified, the root not counted.
    min_prob: a node whose path is less probable than this is not worth verifying.
    expand_prob: a level is not worth drafting when no path to it is this probable.
    paths: of a static tree, each with all its beginnings.
    """

    kind: TreeKind = "dynamic"
    depth: int = 6
    width: int = 4
    nodes: int = 12
    min_prob: float = 0.04
    expand_prob: float = 0.15
    paths: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "none":
            return
        if not (self.depth >= 1 and self.width >= 1 and 1 <= self.nodes <= MAX_DRAFTED):
            raise EagleError(f"tree {self}: depth and width are at least 1, nodes 1 to {MAX_DRAFTED}")
        if not (0 <= self.min_prob < 1 and 0 <= self.expand_prob < 1):
            raise EagleError(f"tree {self}: min_prob and expand_prob lie in [0, 1)")
        if self.kind in ("chain", "dynamic") and self.width * (self.depth - 1) > MAX_EXPANDED:
            raise EagleError(
                f"tree {self}: at most {MAX_EXPANDED} nodes can be expanded, width x (depth - 1)"
            )

    @classmethod
    def parse(cls, text: str) -> TreeConfig:
        """Read ``kind`` or ``kind:key=value,...``, as in ``dynamic:depth=4,nodes=6``; ``static:`` takes
        paths.

        Raises:
            EagleError: the kind or a key is unknown, or a value is out of range.
        """
        kind, _, rest = text.partition(":")
        if kind not in get_args(TreeKind):
            raise EagleError(f"unknown tree {kind!r}; use {_EXAMPLES}")
        if kind == "static":
            return cls.static(_parse_paths(rest, text))
        known = {f.name: f.type for f in fields(cls) if f.name not in ("kind", "paths")}
        settings: dict[str, float] = {}
        for item in filter(None, rest.split(",")):
            key, _, value = item.partition("=")
            try:
                settings[key] = int(value) if known[key] == "int" else float(value)
            except KeyError:
                raise EagleError(
                    f"unknown tree setting {key!r} in {text!r}; there are {', '.join(known)}"
                ) from None
            except ValueError:
                raise EagleError(f"tree setting {item!r} in {text!r} is not a number") from None
        if useless := settings.keys() - _SETTINGS[kind]:
            raise EagleError(f"tree {text!r}: a {kind} tree has no setting {', '.join(sorted(useless))}")
        if kind == "none":
            return cls(kind="none", depth=0, nodes=0)
        if kind == "chain":
            depth = int(settings.get("depth", 3))
            unpruned = {"min_prob": 0.0, "expand_prob": 0.0}
            settings = {**unpruned, **settings, "depth": depth, "width": 1, "nodes": depth}
        if kind in ("best", "cost"):
            settings = {"min_prob": 0.0, "expand_prob": 0.0, **settings}
        if kind == "cost":
            settings = {"depth": 8, "nodes": 15, **settings}
        return cls(kind=kind, **settings)  # type: ignore[arg-type]

    @classmethod
    def static(cls, paths: Sequence[Path]) -> TreeConfig:
        """A fixed tree.

        Raises:
            EagleError: there is no path, two are the same, or the beginning of one is missing.
        """
        ordered = tuple(sorted(paths, key=lambda path: (len(path), path)))
        if not ordered or len(set(ordered)) < len(ordered) or not all(ordered):
            raise EagleError(
                f"a static tree needs distinct paths of at least one rank, not {_shown(ordered)}"
            )
        for path in ordered:
            if min(path) < 0 or (len(path) > 1 and path[:-1] not in ordered):
                raise EagleError(
                    f"static tree: the path {_shown([path])} needs its beginning {_shown([path[:-1]])} too"
                )
        if len(ordered) > MAX_DRAFTED:
            raise EagleError(f"a static tree of {len(ordered)} nodes; at most {MAX_DRAFTED} fit")
        return cls(
            kind="static",
            depth=max(map(len, ordered)),
            width=1 + max(map(max, ordered)),
            nodes=len(ordered),
            min_prob=0.0,
            expand_prob=0.0,
            paths=ordered,
        )

    def __str__(self) -> str:
        if self.kind == "static":
            return f"static:{_shown(self.paths)}"
        shown = {name: getattr(self, name) for name in _ORDER if name in _SETTINGS[self.kind]}
        if self.kind in ("chain", "best"):
            shown = {name: value for name, value in shown.items() if value or not name.endswith("_prob")}
        if not shown:
            return self.kind
        return f"{self.kind}:" + ",".join(f"{name}={value}" for name, value in shown.items())

    def plan(self, left: int) -> TreePlan:
        """For one cycle of a sequence that may still put out ``left`` tokens besides the target's own."""
        depth = max(min(self.depth, left), 0)
        kind = "none" if depth == 0 or self.nodes == 0 else self.kind
        paths = tuple(path for path in self.paths if len(path) <= depth)
        return TreePlan(kind, depth, self.width, self.nodes, self.min_prob, self.expand_prob, paths)


_ORDER = ("depth", "width", "nodes", "min_prob", "expand_prob")


def _parse_paths(rest: str, text: str) -> list[Path]:
    try:
        return [tuple(int(rank) for rank in path.split(".")) for path in filter(None, rest.split(","))]
    except ValueError:
        raise EagleError(f"tree {text!r}: paths are ranks joined by dots, as in static:0,1,0.0") from None


def _shown(paths: Sequence[Path]) -> str:
    return ",".join(".".join(map(str, path)) for path in paths)


@dataclass(frozen=True)
class Prices:
    """What drafting and verifying cost in one cycle of a batch, in tokens that the same time would yield.

    nodes: entry k is the price of k drafted nodes in the batch's verification, against none.
    rows: entry r is the price of one more pass of the drafter over r nodes.
    """

    nodes: tuple[float, ...]
    rows: tuple[float, ...]

    def marginal(self, nodes: int) -> float:
        """The least price of a node more, the next few averaged: padded shapes make prices a staircase."""
        here = self.nodes[min(nodes, len(self.nodes) - 1)]
        ahead = self.nodes[nodes + 1 : nodes + 5]
        return min(((price - here) / (j + 1) for j, price in enumerate(ahead)), default=math.inf)


@dataclass(frozen=True)
class TreePlan:
    """What may be drafted for one sequence in one cycle; the fields are those of ``TreeConfig``.

    prices: of a ``cost`` tree, one record shared by all the plans of a cycle.
    """

    kind: TreeKind
    depth: int = 0
    width: int = 0
    nodes: int = 0
    min_prob: float = 0.0
    expand_prob: float = 0.0
    paths: tuple[Path, ...] = ()
    prices: Prices | None = None

    @classmethod
    def none(cls) -> TreePlan:
        """Plain decoding."""
        return cls("none")

    def cut(self, depth: int) -> TreePlan:
        """The same, no deeper than ``depth``."""
        return self if self.depth <= depth else replace(self, depth=depth)


@dataclass(frozen=True)
class DraftTree:
    """A tree to verify: node 0 is the root (the last token the target chose), parents precede children.

    tokens, parents, depths: one entry a node; the root's parent is -1 and its depth 0.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        return cls((token,), (-1,), (0,))

    @property
    def drafted(self) -> int:
        return len(self.tokens) - 1

    def ancestors(self) -> list[int]:
        """Ancestor words: bit j of entry i is set when node j is i or above it (as signed 64-bit
        integers)."""
        words: list[int] = []
        for i, parent in enumerate(self.parents):
            words.append((words[parent] if parent >= 0 else 0) | bit(i))
        return words


def bit(i: int) -> int:
    """Bit i of a 64-bit word, as a signed integer."""
    return 1 << i if i < 63 else -(1 << 63)


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


@dataclass(frozen=True)
class Outcome:
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

    The score of a candidate is the log-probability of its path. A child never scores above its parent and
    ties go to the lower index, so the best candidates always form a tree.
    """

    def __init__(self, plan: TreePlan, root: int, confidence: Confidence | None = None) -> None:
        self.plan = plan
        self.root = root
        self._confidence = confidence or AsStated()
        self._tokens: list[int] = []
        self._parents: list[int] = []  # candidate index; -1 for children of the root
        self._scores: list[float] = []
        self._depths: list[int] = []
        self._stated: list[float] = []
        self._ranks: list[Path] = []
        self._expanded: list[int] = []

    def add_children(self, parent: int, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Candidates below ``parent`` (a candidate index, -1 the root), best first."""
        above = self._scores[parent] if parent >= 0 else 0.0
        depth = self._depths[parent] + 1 if parent >= 0 else 1
        ranks = self._ranks[parent] if parent >= 0 else ()
        for rank, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
            stated = math.exp(min(log_prob, 0.0))
            self._tokens.append(token)
            self._parents.append(parent)
            self._scores.append(above + log(self._confidence.probability(depth, stated)))
            self._depths.append(depth)
            self._stated.append(stated)
            self._ranks.append((*ranks, rank))

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
        return self._scores[candidate]

    def expand(self, candidates: Sequence[int]) -> None:
        """Note that the drafter has run on these."""
        self._expanded.extend(candidates)

    @property
    def capacity(self) -> int:
        """How many more nodes can be expanded: their ancestor words have 64 bits."""
        return MAX_EXPANDED - len(self._expanded)

    def frontier(self) -> list[int]:
        """Candidates to expand next, best first; empty when that would not pay.

        Nodes that cannot lead into the final tree are left out: a child scores no higher than its parent,
        so one below the worst selected candidate has no descendant worth drafting.
        """
        plan = self.plan
        if plan.kind == "static":
            return [i for i in self._last_level() if self._has_child(self._ranks[i])][: self.capacity]
        open_ones = self._unexpanded() if plan.kind == "best" else self._last_level()
        chosen = set(self._best())
        best = sorted((i for i in open_ones if i in chosen), key=self._order)[
            : min(plan.width, self.capacity)
        ]
        if not best or self._scores[best[0]] < log(plan.expand_prob):
            return []
        return best

    def _order(self, candidate: int) -> tuple[float, int]:
        return -self._scores[candidate], candidate

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
        """The best ``nodes`` candidates that are probable enough, by score, ties by index."""
        if self.plan.kind == "static":
            return [i for i, ranks in enumerate(self._ranks) if ranks in self.plan.paths]
        floor = log(self.plan.min_prob)
        worthy = [i for i, score in enumerate(self._scores) if score >= floor]
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
        chance, total = math.exp(self._scores[candidate]), 0.0
        last = self._confidence.probability(self._depths[candidate], self._stated[candidate])
        for depth in range(self._depths[candidate] + 1, self.plan.depth + 1):
            children = self._confidence.expected(depth, last)[: self.plan.width]
            net = sum(max(0.0, chance * child - node_price) for child in children)
            net -= level_price if total else 0.0
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
            known = node >= 0
            chance = self._confidence.probability(self._depths[node], self._stated[node]) if known else 1.0
            for rank, i in enumerate(self._children(node)):
                hit = self._tokens[i] == token
                found.append(Outcome(self._depths[i], self._stated[i], chance, rank, hit))
        return found


def log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def frontiers(growths: Sequence[TreeGrowth]) -> list[list[int]]:
    """What to expand next in each tree of a batch; all empty when no tree is worth another pass."""
    chosen = [[] if growth.plan.prices is not None else growth.frontier() for growth in growths]
    priced = [b for b, growth in enumerate(growths) if growth.plan.prices is not None]
    if not priced:
        return chosen
    prices = growths[priced[0]].plan.prices
    assert prices is not None
    node_price = prices.marginal(sum(map(len, _cut(growths, priced, prices))))
    level_price = prices.rows[min(len(priced), len(prices.rows) - 1)] / len(priced)
    gains = sorted(
        (-growths[b].gain(i, node_price, level_price), b, i) for b in priced for i in growths[b]._last_level()
    )
    taken: list[tuple[int, int]] = []
    room = {b: min(growths[b].plan.width, growths[b].capacity) for b in priced}
    total, best, best_count = 0.0, 0.0, 0
    for gain, b, i in gains:
        if gain >= 0 or len(taken) + 1 >= len(prices.rows):
            break
        if room[b] == 0:
            continue
        room[b] -= 1
        taken.append((b, i))
        total -= gain
        if total - prices.rows[len(taken)] > best:
            best, best_count = total - prices.rows[len(taken)], len(taken)
    for b, i in taken[:best_count]:
        chosen[b].append(i)
    return chosen


Children = Callable[[int, int], tuple[Sequence[int], Sequence[float]]]
"""Tokens below a candidate (-1: the root) of the tree with this number, and their log-probabilities, best
first."""


def grow(growths: Sequence[TreeGrowth], children: Children) -> None:
    """Grow the trees of a batch from children that cost nothing to come by."""
    expand = [[-1] if growth.plan.kind != "none" and growth.plan.depth > 0 else [] for growth in growths]
    while any(expand):
        for b, (growth, candidates) in enumerate(zip(growths, expand, strict=True)):
            growth.expand([candidate for candidate in candidates if candidate >= 0])
            for candidate in candidates:
                growth.add_children(candidate, *children(b, candidate))
        expand = frontiers(growths)


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
    ordered = sorted((-growths[b]._scores[i], b, i) for b in priced for i in range(growths[b].candidates))
    room = {b: growths[b].plan.nodes for b in priced}
    taken: list[tuple[int, int]] = []
    total, best, best_count = 0.0, 0.0, 0
    for score, b, i in ordered:
        if len(taken) + 1 >= len(prices.nodes):
            break
        if room[b] == 0:
            continue
        room[b] -= 1
        taken.append((b, i))
        total += math.exp(-score)
        if total - prices.nodes[len(taken)] > best:
            best, best_count = total - prices.nodes[len(taken)], len(taken)
    chosen: dict[int, list[int]] = {b: [] for b in priced}
    for b, i in taken[:best_count]:
        chosen[b].append(i)
    return [chosen[b] for b in priced]


def tree_tensors(
    tree: DraftTree, root_position: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens, parents, positions, ancestor words, each int64 [1, N]."""
    positions = [root_position + depth for depth in tree.depths]
    stacked = torch.tensor([tree.tokens, tree.parents, positions, tree.ancestors()], device=device)
    return stacked[0:1], stacked[1:2], stacked[2:3], stacked[3:4]
