"""Draft trees grown on the device, all of one shape: EAGLE-2's, as `stages.decoding.growth` has it.

Level by level the best candidates are expanded; of all candidates the best become the tree, by the score of
their path, ties by the order in which they came. The tree is the one that the host would grow from the same
scores; but the device cannot stop early, so a level that is not worth drafting is drafted and left out.
Trees with fewer nodes than the shape has are filled up with nodes that nothing accepts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.accept import PADDING
from stages.decoding.tree import TreeConfig


@dataclass(frozen=True)
class Trees:
    """B trees of N nodes; node 0 is the root, and parents precede children.

    tokens, depths: int64 [B, N].
    parents: int64 [B, N], -1 the root's, PADDING of a node that is none.
    words: int64 [B, N] ancestor words; padding sees the root and itself, so that its states are numbers.
    drafted: int64 [B], nodes that are neither root nor padding.
    """

    tokens: Tensor
    depths: Tensor
    parents: Tensor
    words: Tensor
    drafted: Tensor

    @classmethod
    def chains(cls, root: Tensor, drafted: Tensor) -> Trees:
        """One candidate a level: root int64 [B], drafted int64 [B, D], D from 0 on."""
        tokens = torch.cat((root[:, None], drafted), 1)
        batch, nodes = tokens.shape
        depths = torch.arange(nodes, device=root.device)
        return cls(
            tokens,
            depths.expand(batch, -1),
            (depths - 1).expand(batch, -1),
            chain_words(nodes, root.device).expand(batch, -1),
            torch.full_like(root, nodes - 1),
        )

    def only_where(self, drafts: Tensor) -> Trees:
        """Without a draft, where ``drafts`` bool [B] says so."""
        behind = torch.arange(self.tokens.shape[1], device=drafts.device) > 0
        parents = torch.where(behind & ~drafts[:, None], PADDING, self.parents)
        drafted = torch.where(drafts, self.drafted, 0)
        return Trees(self.tokens, self.depths, parents, self.words, drafted)


@dataclass(frozen=True)
class Frontier:
    """The F candidates of each tree that are expanded next.

    numbers: int64 [B, F], counted over all candidates of the tree.
    above: int64 [B, F], which of the candidates expanded before it is the parent.
    tokens: int64 [B, F]; scores: fp32 [B, F].
    """

    numbers: Tensor
    above: Tensor
    tokens: Tensor
    scores: Tensor


class Growth:
    """The candidates of B trees."""

    def __init__(self, tree: TreeConfig) -> None:
        """``tree``: a chain or a dynamic one."""
        self._tree = tree
        self._tokens: list[Tensor] = []  # of each level [B, C]
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._alive: Tensor | None = None

    def add(self, front: Frontier | None, tokens: Tensor, scores: Tensor) -> None:
        """A level of candidates.

        Args:
            front: the nodes they stand below; None for the root.
            tokens: int64 [B, F, W], the children of each, best first.
            scores: fp32 [B, F, W], log-probabilities of the paths to them.
        """
        if front is None:
            parents = torch.full_like(tokens, -1)
        else:
            parents = front.numbers[..., None].expand_as(tokens)
            if self._tree.expand_prob > 0:
                worth = front.scores[:, :1] >= math.log(self._tree.expand_prob)  # the best comes first
                self._alive = worth if self._alive is None else self._alive & worth
                scores = scores.masked_fill(~self._alive[..., None], -torch.inf)
        self._tokens.append(tokens.flatten(1))
        self._scores.append(scores.flatten(1))
        self._parents.append(parents.flatten(1))

    def frontier(self) -> Frontier:
        """The best candidates of the last level."""
        before = sum(level.shape[1] for level in self._tokens[:-1])
        children = self._children
        chosen = _best(self._scores[-1], self._tree.width)
        return Frontier(
            before + chosen,
            chosen // children,
            self._tokens[-1].gather(1, chosen),
            self._scores[-1].gather(1, chosen),
        )

    @property
    def _children(self) -> int:
        """Candidates below each node that was expanded."""
        return self._tokens[0].shape[1]

    def trees(self, root: Tensor) -> Trees:
        """The best candidates of all, below the roots int64 [B]."""
        scores, parents = torch.cat(self._scores, 1), torch.cat(self._parents, 1)  # [B, C]
        batch, candidates = scores.shape
        chosen = _best(scores, self._tree.nodes)
        best = scores.gather(1, chosen)
        floor = math.log(self._tree.min_prob) if self._tree.min_prob > 0 else -math.inf
        real = (best >= floor) & (best > -torch.inf)
        # In the order in which they came, which has parents before children; padding last.
        chosen = torch.where(real, chosen, candidates).sort(dim=1).values
        real = chosen < candidates
        number = chosen.clamp(max=candidates - 1)
        levels = [
            torch.full((level.shape[1],), depth, device=root.device)
            for depth, level in enumerate(self._tokens, start=1)
        ]
        depths = torch.where(real, torch.cat(levels)[number], 1)
        tokens = torch.where(real, torch.cat(self._tokens, 1).gather(1, number), 0)
        # Where each candidate has gone: the root, number -1, to node 0. Of those not chosen no child is.
        nodes = torch.arange(1, chosen.shape[1] + 1, device=root.device).expand(batch, -1)
        place = torch.zeros(batch, candidates + 2, dtype=torch.int64, device=root.device)
        place = place.scatter(1, chosen + 1, nodes)
        above = place.gather(1, parents.gather(1, number) + 1)
        above = torch.where(real, above, 0)
        first = torch.zeros_like(root)[:, None]
        return Trees(
            torch.cat((root[:, None], tokens), 1),
            torch.cat((first, depths), 1),
            torch.cat((first - 1, torch.where(real, above, PADDING)), 1),
            _words(torch.cat((first, above), 1), len(self._tokens)),
            real.sum(1),
        )


def chain_words(nodes: int, device: torch.device) -> Tensor:
    """Ancestor words of a chain, int64 [nodes]."""
    return _bits(nodes, device).cumsum(0)


def _bits(nodes: int, device: torch.device) -> Tensor:
    return torch.ones(nodes, dtype=torch.int64, device=device) << torch.arange(nodes, device=device)


def _words(above: Tensor, depth: int) -> Tensor:
    """Ancestor words of nodes whose parents are ``above`` int64 [B, N], node 0 its own, ``depth`` levels
    down."""
    own = _bits(above.shape[1], above.device).expand_as(above)
    words = own
    for _ in range(depth):
        words = own | words.gather(1, above)
    return words


def _best(scores: Tensor, count: int) -> Tensor:
    """Places of the best scores [B, C], best first, of equal ones the first: int64 [B, min(count, C)]."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
