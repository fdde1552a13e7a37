"""Draft trees: their settings, their growth (EAGLE-2, arXiv 2406.16858), and the form the target verifies."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from stages.errors import EagleError

MAX_DRAFTED = 63  # ancestor words have 64 bits, one of them the root's


@dataclass(frozen=True)
class TreeConfig:
    """How a tree is grown each cycle.

    kind: ``none`` (plain decoding), ``chain`` (one candidate a level) or ``dynamic`` (EAGLE-2).
    depth: levels drafted at most.
    width: nodes expanded a level, and children tried for each.
    nodes: drafted nodes verified, the root not counted.
    min_prob: a node whose path is less probable than this is not worth verifying.
    expand_prob: a level is not worth drafting when no path to it is this probable.
    """

    kind: Literal["none", "chain", "dynamic"] = "dynamic"
    depth: int = 6
    width: int = 4
    nodes: int = 12
    min_prob: float = 0.04
    expand_prob: float = 0.15

    def __post_init__(self) -> None:
        if self.kind == "none":
            return
        if not (self.depth >= 1 and self.width >= 1 and 1 <= self.nodes <= MAX_DRAFTED):
            raise EagleError(f"tree {self}: depth and width are at least 1, nodes 1 to {MAX_DRAFTED}")
        if not (0 <= self.min_prob < 1 and 0 <= self.expand_prob < 1):
            raise EagleError(f"tree {self}: min_prob and expand_prob lie in [0, 1)")
        if self.width * (self.depth - 1) > MAX_DRAFTED + 1:
            raise EagleError(
                f"tree {self}: at most {MAX_DRAFTED + 1} nodes can be expanded, width x (depth - 1)"
            )

    @classmethod
    def parse(cls, text: str) -> TreeConfig:
        """Read ``kind`` or ``kind:key=value,...``, as in ``dynamic:depth=4,nodes=6`` or ``chain:depth=3``.

        Raises:
            EagleError: the kind or a key is unknown, or a value is out of range.
        """
        kind, _, rest = text.partition(":")
        known = {f.name: f.type for f in fields(cls) if f.name != "kind"}
        if kind not in ("none", "chain", "dynamic"):
            raise EagleError(
                f"unknown tree {kind!r}; use none, chain:depth=3 or dynamic:depth=6,width=4,nodes=12"
            )
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
        useless = settings.keys() - {"none": set(), "chain": known.keys() - {"width", "nodes"}}.get(
            kind, known.keys()
        )
        if useless:
            raise EagleError(f"tree {text!r}: a {kind} tree has no setting {', '.join(sorted(useless))}")
        if kind == "none":
            return cls(kind="none", depth=0, nodes=0)
        if kind == "chain":
            depth = int(settings.get("depth", 3))
            settings = {
                "min_prob": 0.0,
                "expand_prob": 0.0,
                **settings,
                "depth": depth,
                "width": 1,
                "nodes": depth,
            }
        return cls(kind=kind, **settings)  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.kind == "none":
            return "none"
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "kind"}
        if self.kind == "chain":
            shown = {name: shown[name] for name in ("depth", "min_prob", "expand_prob") if shown[name]}
        return f"{self.kind}:" + ",".join(f"{name}={value}" for name, value in shown.items())


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


class TreeGrowth:
    """Collects candidates level by level and picks the best ones: expand, then rerank (EAGLE-2, sections
    4.1 and 4.2).

    The score of a candidate is the log-probability of its path. A child never scores above its parent and
    ties go to the lower index, so the best candidates always form a tree.
    """

    def __init__(self, config: TreeConfig, root: int, depth: int) -> None:
        """``depth`` levels at most; it may be below the config's near the end of an output."""
        self._config = config
        self._root = root
        self._max_depth = min(config.depth, depth)
        self._tokens: list[int] = []
        self._parents: list[int] = []  # candidate index; -1 for children of the root
        self._scores: list[float] = []
        self._depths: list[int] = []

    def add_children(self, parent: int, tokens: list[int], log_probs: list[float]) -> None:
        """Candidates below ``parent`` (a candidate index, -1 the root), best first."""
        above = self._scores[parent] if parent >= 0 else 0.0
        depth = self._depths[parent] + 1 if parent >= 0 else 1
        for token, log_prob in zip(tokens, log_probs, strict=True):
            self._tokens.append(token)
            self._parents.append(parent)
            self._scores.append(above + min(log_prob, 0.0))
            self._depths.append(depth)

    def token(self, candidate: int) -> int:
        return self._tokens[candidate]

    def parent(self, candidate: int) -> int:
        return self._parents[candidate]

    def frontier(self) -> list[int]:
        """Candidates of the last level to expand, best first; empty when another level would not pay.

        Nodes that cannot lead into the final tree are left out: a child scores no higher than its parent,
        so one below the worst selected candidate has no descendant worth drafting.
        """
        if not self._depths or self._depths[-1] >= self._max_depth:
            return []
        level = [i for i, depth in enumerate(self._depths) if depth == self._depths[-1]]
        chosen = set(self._best())
        best = sorted((i for i in level if i in chosen), key=lambda i: (-self._scores[i], i))[
            : self._config.width
        ]
        if not best or self._scores[best[0]] < _log(self._config.expand_prob):
            return []
        return best

    def _best(self) -> list[int]:
        """The best ``nodes`` candidates that are probable enough, by score, ties by index."""
        floor = _log(self._config.min_prob)
        worthy = [i for i, score in enumerate(self._scores) if score >= floor]
        return sorted(worthy, key=lambda i: (-self._scores[i], i))[: self._config.nodes]

    def tree(self) -> DraftTree:
        """The tree of the best candidates, parents first."""
        chosen = sorted(self._best())
        place = {-1: 0} | {candidate: i + 1 for i, candidate in enumerate(chosen)}
        return DraftTree(
            (self._root, *(self._tokens[i] for i in chosen)),
            (-1, *(place[self._parents[i]] for i in chosen)),
            (0, *(self._depths[i] for i in chosen)),
        )


def _log(probability: float) -> float:
    return math.log(probability) if probability > 0 else -math.inf


def tree_tensors(
    tree: DraftTree, root_position: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """tokens, parents, positions, ancestor words, each int64 [1, N]."""
    positions = [root_position + depth for depth in tree.depths]
    stacked = torch.tensor([tree.tokens, tree.parents, positions, tree.ancestors()], device=device)
    return stacked[0:1], stacked[1:2], stacked[2:3], stacked[3:4]
