"""Draft trees: their settings, what one cycle may draft, and the form in which they are verified."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple, get_args

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
            settings = {"depth": 8, "width": 8, "nodes": 15, **settings}
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


class DraftTree(NamedTuple):
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
