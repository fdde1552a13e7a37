from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import MAX_NODES, node_depths, tree_attention, tree_mask
from tests.kernels.trees import ancestor_words, attention_by_definition, parents

SLOTS = 5


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_each_node_attends_to_the_prefix_and_its_ancestors(data):
    batch = data.draw(st.integers(1, 3))
    trees = data.draw(parents(max_nodes=9, batch=batch))
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=batch, max_size=batch))
    slots = data.draw(st.permutations(range(SLOTS)))[:batch]
    group, kv_heads, dim = data.draw(
        st.tuples(st.sampled_from([1, 3]), st.integers(1, 2), st.sampled_from([8, 20]))
    )
    window = data.draw(st.none() | st.integers(1, 12))
    softcap = data.draw(st.none() | st.just(2.0))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    nodes = len(trees[0])
    cache = torch.randn(2, 2, SLOTS, kv_heads, 40, dim, generator=generator)
    query = torch.randn(batch, group * kv_heads, nodes, dim, generator=generator)

    out = tree_attention(
        query,
        cache[0, 1],
        cache[1, 1],
        torch.tensor(slots),
        torch.tensor(lengths),
        ancestor_words(trees),
        0.3,
        sliding_window=window,
        softcap=softcap,
    )
    expected = attention_by_definition(
        query, cache[0, 1], cache[1, 1], slots, lengths, trees, 0.3, window, softcap
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_padding_nodes_give_zeros(dtype, softcap):
    cache = torch.randn(2, 1, 1, 30, 16, dtype=dtype)
    words = ancestor_words([[-1, 0, -2, -2]])
    query = torch.randn(1, 3, 4, 16, dtype=dtype)
    for length in (0, 20):
        out = tree_attention(
            query, *cache, torch.tensor([0]), torch.tensor([length]), words, 0.25, softcap=softcap
        )
        assert torch.all(out[:, :, 2:] == 0)
        assert torch.all(torch.isfinite(out))


def test_the_64th_node_uses_the_sign_bit():
    trees = [[-1, *range(MAX_NODES - 1)]]
    words = ancestor_words(trees)
    assert int(words[0, 63]) == -1
    assert node_depths(words).tolist() == [list(range(MAX_NODES))]
    cache, query = torch.randn(2, 1, 2, 80, 8), torch.randn(1, 2, MAX_NODES, 8)
    out = tree_attention(query, *cache, torch.tensor([0]), torch.tensor([10]), words, 0.3)
    expected = attention_by_definition(query, cache[0], cache[1], [0], [10], trees, 0.3)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_prebuilt_mask_and_a_slice_of_slots_change_nothing():
    cache, query = torch.randn(2, 4, 2, 50, 16), torch.randn(2, 6, 4, 16)
    lengths, words = torch.tensor([30, 7]), ancestor_words([[-1, 0, 0, 2], [-1, 0, 1, -2]])
    plain = tree_attention(query, *cache, torch.tensor([1, 2]), lengths, words, 0.25, sliding_window=9)
    mask = tree_mask(lengths, words, 50, sliding_window=9)
    assert mask.shape == (2, 1, 4, 50)
    built = tree_attention(query, *cache, slice(1, 3), lengths, words, 0.25, sliding_window=9, mask=mask)
    torch.testing.assert_close(plain, built, rtol=1e-6, atol=1e-6)


def test_what_lies_beyond_a_sequence_s_rows_is_never_used():
    cache, query = torch.randn(2, 2, 1, 40, 8), torch.randn(2, 1, 3, 8)
    args = (torch.tensor([0, 1]), torch.tensor([4, 20]), ancestor_words([[-1, 0, 1], [-1, 0, 0]]), 0.3)
    before = tree_attention(query, *cache, *args)
    cache[:, 0, :, 7:] = 1e4
    cache[:, 1, :, 23:] = 1e4
    torch.testing.assert_close(tree_attention(query, *cache, *args), before)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 15])
def test_a_level_attends_to_levels_written_before_it(window):
    trees = [[-1, 0, 0, 1, 2, 3]]
    cache, query, words = torch.randn(2, 1, 2, 40, 8), torch.randn(1, 4, 6, 8), ancestor_words(trees)
    expected = attention_by_definition(query, cache[0], cache[1], [0], [20], trees, 0.3, window)[:, :, 3:]
    place = torch.tensor([0]), torch.tensor([20])
    out = tree_attention(
        query[:, :, 3:], *cache, *place, words[:, 3:], 0.3, tree_rows=6, sliding_window=window
    )
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
