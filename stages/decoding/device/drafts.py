"""What drafts on the device: for all sequences of a cycle at once, in one shape, without the host."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stages.decoding.device.growth import Trees
from stages.decoding.device.state import Rows
from stages.decoding.drafters import StateKind


@dataclass(frozen=True)
class Moved:
    """What a cycle has found, for B sequences; columns 0 to ``depth`` of the accepted path.

    path: int64 [B, A], the accepted nodes, the root first, then padding with any node.
    tokens: int64 [B, A], what follows each; the last one put out is the next root.
    emitted: int64 [B], tokens put out, 0 of a sequence that had ended.
    accepted: int64 [B], those of them that were drafted.
    """

    path: Tensor
    tokens: Tensor
    emitted: Tensor
    accepted: Tensor


class Drafts(Protocol):
    """A drafter whose state is a row a slot, as that of the cycle is."""

    state: StateKind
    depth: int
    """Levels of its trees."""
    nodes: int
    """Nodes of its trees, the root among them."""

    def reserve(self, tokens: int) -> None:
        """Make room for sequences of so many tokens, those without drafts too."""

    def enter(self, slot: int, prompt_ids: Sequence[int]) -> None:
        """A sequence joins that the host's drafter has followed so far."""

    def leave(self, slot: int, length: int) -> None:
        """It has ended, with so many rows in its prefix: the host's drafter may use them again."""

    def draft(self, rows: Rows) -> Trees:
        """What may follow each root."""

    def extend(self, rows: Rows, states: Tensor | None, moved: Moved) -> None:
        """Take what was verified; ``states`` [B, N, w] are the target's at every node, those asked for."""

    def storage(self) -> tuple[int, ...]:
        """Where its tensors lie; what was captured holds as long as this stays the same."""


class NoDrafts:
    """Plain decoding."""

    state: StateKind = "none"
    depth, nodes = 0, 1

    def reserve(self, tokens: int) -> None:
        """Nothing is kept."""

    def enter(self, slot: int, prompt_ids: Sequence[int]) -> None:
        """Nothing is kept."""

    def leave(self, slot: int, length: int) -> None:
        """Nothing is kept."""

    def draft(self, rows: Rows) -> Trees:
        return Trees.chains(rows.root, rows.root.new_empty(len(rows.root), 0))

    def extend(self, rows: Rows, states: Tensor | None, moved: Moved) -> None:
        """Nothing is kept."""

    def storage(self) -> tuple[int, ...]:
        return ()


class OracleDrafts:
    """Chains out of outputs that are known, right at each position with a given probability."""

    state: StateKind = "none"

    def __init__(
        self,
        references: Mapping[tuple[int, ...], Sequence[int]],
        right: float,
        vocab_size: int,
        *,
        slots: int,
        depth: int,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        """``references``: prompt and output, by prompt."""
        self.depth, self.nodes = depth, depth + 1
        self._references = references
        self._right, self._vocab_size, self._seed = right, vocab_size, seed
        self._known = torch.zeros(slots + 1, 0, dtype=torch.int64, device=device)

    def reserve(self, tokens: int) -> None:
        size = tokens + self.depth
        if size > self._known.shape[1]:
            longer = self._known.new_zeros(len(self._known), size)
            longer[:, : self._known.shape[1]] = self._known
            self._known = longer

    def enter(self, slot: int, prompt_ids: Sequence[int]) -> None:
        reference = self._references[tuple(prompt_ids)]
        hits = [random.Random(f"{self._seed} {p}").random() < self._right for p in range(len(reference))]
        told = [t if hit else (t + 1) % self._vocab_size for t, hit in zip(reference, hits, strict=True)]
        self.reserve(len(told))
        self._known[slot, : len(told)] = torch.tensor(told, device=self._known.device)

    def leave(self, slot: int, length: int) -> None:
        """Nothing is kept."""

    def draft(self, rows: Rows) -> Trees:
        depths = torch.arange(1, self.depth + 1, device=rows.root.device)
        places = rows.length.clamp(min=0)[:, None] + depths
        drafted = self._known[rows.slots].gather(1, places.clamp(max=self._known.shape[1] - 1))
        return Trees.chains(rows.root, drafted)

    def extend(self, rows: Rows, states: Tensor | None, moved: Moved) -> None:
        """Nothing is kept."""

    def storage(self) -> tuple[int, ...]:
        return (self._known.data_ptr(),)
