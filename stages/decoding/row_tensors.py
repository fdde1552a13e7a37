"""The rows of a forward: as tensors, and some of what came of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import ops_loaded
from stages.decoding.tree import DraftTree

_KEPT = 256
"""Rows for which memory is kept."""

Place = tuple[int, int, int, int]
"""Slot, cache row, stable prefix and ancestor word of a row; see ``RowStep``."""


class PlacedRows(NamedTuple):
    """Rows of a forward over trees as tensors: tokens and positions int64 [M], places int64 [M, 4].

    lengths: of the stable prefixes that they were made for, tree by tree.
    """

    lengths: list[int]
    tokens: Tensor
    positions: Tensor
    places: Tensor


def row_tensors(
    tokens: Sequence[int], positions: Sequence[int], places: Sequence[Place], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and positions int64 [M] and places int64 [M, 4], in one transfer: on a CPU too a small tensor
    costs more to make than to fill."""
    count = len(tokens)
    flat = [*tokens, *positions, *(number for place in places for number in place)]
    whole = whole_numbers(flat, device)
    return whole[:count], whole[count : 2 * count], whole[2 * count :].view(count, 4)


class RowBuffers:
    """`row_tensors` on a CPU for the few rows of a cycle, in memory that is used again: what was handed out
    before for as many rows changes."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[np.ndarray, tuple[Tensor, Tensor, Tensor]]] = {}

    def of_trees(
        self, slots: Sequence[int], lengths: Sequence[int], trees: Sequence[DraftTree]
    ) -> PlacedRows:
        """A tree in each slot, behind a stable prefix of so many rows."""
        tokens: list[int] = []
        positions: list[int] = []
        places: list[Place] = []
        for slot, length, tree in zip(slots, lengths, trees, strict=True):
            tokens += tree.tokens
            positions += [length + depth for depth in tree.depths]
            places += [(slot, length + i, length, word) for i, word in enumerate(tree.ancestors())]
        return PlacedRows([*lengths], *self._fill(tokens, positions, places))

    def _fill(
        self, tokens: Sequence[int], positions: Sequence[int], places: Sequence[Place]
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = len(tokens)
        if count > _KEPT:
            return row_tensors(tokens, positions, places, torch.device("cpu"))
        if count not in self._made:
            whole = np.empty(6 * count, dtype=np.int64)
            flat = torch.from_numpy(whole)
            made = flat[:count], flat[count : 2 * count], flat[2 * count :].view(count, 4)
            self._made[count] = whole, made
        whole, made = self._made[count]
        whole[:] = [*tokens, *positions, *(number for place in places for number in place)]
        return made


def whole_numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len(values)]; by NumPy, which takes a list in a third of the time."""
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)


def take_rows(states: Tensor, rows: Sequence[int]) -> Tensor:
    """Some rows of states [N, w]; a run of them is not copied."""
    begin, end = rows[0], rows[-1] + 1
    if list(rows) == list(range(begin, end)):
        return states if end - begin == len(states) else states[begin:end]
    if states.device.type == "cpu" and ops_loaded():
        return torch.ops.eagle_cpu.take_rows(states, rows)
    return states[rows]
