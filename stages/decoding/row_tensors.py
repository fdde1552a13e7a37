"""The rows of one forward as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

Place = tuple[int, int, int, int]
"""Slot, cache row, stable prefix and ancestor word of a row; see ``RowStep``."""


def row_tensors(
    tokens: Sequence[int], positions: Sequence[int], places: Sequence[Place], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and positions int64 [M] and places int64 [M, 4], in one transfer: on a CPU too a small tensor
    costs more to make than to fill."""
    count = len(tokens)
    flat = [*tokens, *positions, *(number for place in places for number in place)]
    whole = whole_numbers(flat, device)
    return whole[:count], whole[count : 2 * count], whole[2 * count :].view(count, 4)


def whole_numbers(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len(values)]; by NumPy, which takes a list in a third of the time."""
    return torch.from_numpy(np.array(values, dtype=np.int64)).to(device)
