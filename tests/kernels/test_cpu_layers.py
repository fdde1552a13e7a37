"""Whole decoder layers as one op, of any shape, against float64; each row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.cpu import load_ops
from tests.kernels.decoder_layers import Decoder, Layers
from tests.kernels.trees import parents

pytestmark = pytest.mark.skipif(load_ops() is not None, reason=f"no CPU ops: {load_ops()}")

# Of the states' own size. In bf16 every product, norm and sum is rounded on the way, as transformers does.
CLOSE = {torch.float32: 1e-4, torch.bfloat16: 0.1}

shapes = st.builds(
    lambda heads, size, share, **rest: Layers(
        heads=heads[0], kv_heads=heads[1], size=size, turned=2 * max(1, int(size * share / 2)), **rest
    ),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (16, 1), (5, 5)]),
    st.sampled_from([8, 20, 64, 80, 128, 256]),
    st.sampled_from([1.0, 0.5]),
    hidden=st.integers(8, 70).map(lambda half: 2 * half),
    inner=st.sampled_from([32, 96, 160]),
    depth=st.sampled_from([1, 2]),
    gelu=st.booleans(),
    norms=st.sampled_from([0, 1, 2]),
    query_norms=st.booleans(),
    sandwich=st.booleans(),
    biased=st.booleans(),
    window=st.sampled_from([0, 1, 3, 30, 50]),
    softcap=st.sampled_from([0.0, 2.0]),
    dtype=st.sampled_from(list(CLOSE)),
)
prefixes = st.sampled_from([0, 1, 2, 17, 40, 95])
CHAIN = [-1, *range(63)]  # the last word has all 64 bits


@settings(deadline=None, max_examples=60)
@given(
    shapes,
    st.lists(st.tuples(prefixes, parents(9).map(lambda trees: trees[0])), min_size=1, max_size=3),
    st.permutations(range(3)),
    st.integers(0, 1000),
    st.integers(1, 3),
)
@example(Layers(size=64), [(1, CHAIN)], [0, 1, 2], 0, 2)
@example(
    Layers(size=20, window=5, dtype=torch.bfloat16), [(0, CHAIN), (9, [-1, 0, 1, 0, 0, 2])], [2, 0, 1], 0, 2
)
def test_layers_are_what_float64_makes_of_them_and_each_row_as_if_alone(
    shape: Layers, trees: list[tuple[int, list[int]]], slots: list[int], seed: int, threads: int
) -> None:
    sequences = [(slot, prefix, tree) for slot, (prefix, tree) in zip(slots, trees, strict=False)]
    decoder = Decoder(shape, sequences, seed)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tapped = tuple(range(shape.depth))
        states, features = decoder.by_op(tapped=tapped)
        real = [i for i, parent in enumerate(p for _, _, tree in sequences for p in tree) if parent != -2]
        expected, entering = decoder.by_definition()
        for found, exact in ((states, expected), *zip(features.chunk(len(tapped), 1), entering, strict=True)):
            off = (found[real].double() - exact[real]).square().mean(-1).sqrt()
            assert torch.all(off <= CLOSE[shape.dtype] * exact[real].square().mean(-1).sqrt().clamp(min=1))
        first = len(sequences[0][2])
        alone, _ = decoder.by_op(rows=list(range(first)))
        assert torch.equal(alone, states[:first])
    finally:
        torch.set_num_threads(before)
