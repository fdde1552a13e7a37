from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import compact
from kernels.compact import compact_torch
from kernels.cpu import load_ops


@pytest.mark.parametrize("kernel", [compact, compact_torch])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_accepted_rows_become_a_dense_prefix_and_nothing_else_moves(kernel, data):
    assert load_ops() is None  # on a CPU `compact` is an op then
    batch, nodes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 8))
    slots = data.draw(st.permutations(range(4)))[:batch]
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch))
    paths = [
        [0, *sorted(data.draw(st.sets(st.integers(1, nodes - 1))))] if nodes > 1 else [0]
        for _ in range(batch)
    ]
    cache = torch.arange(2 * 2 * 4 * 2 * 30 * 3.0).view(2, 2, 4, 2, 30, 3)
    # Rows in front of heads in memory: strides must be honoured.
    moved = cache.transpose(3, 4).contiguous().transpose(3, 4)
    padded = torch.tensor([p + [-1] * (nodes - len(p)) for p in paths])
    result = kernel(
        moved, torch.tensor(slots), torch.tensor(lengths), padded, torch.tensor([len(p) for p in paths])
    )
    assert result is None
    expected = cache.clone()
    for slot, length, path in zip(slots, lengths, paths, strict=True):
        for k, node in enumerate(path):
            expected[:, :, slot, :, length + k] = cache[:, :, slot, :, length + node]
    assert torch.equal(moved, expected)
