from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Filters, accept_tree, draw_tokens, first_argmax, gumbel_noise_vocab
from kernels.filters import filter_floor_torch
from tests.kernels.trees import (
    chain_of,
    parents,
    path_by_definition,
    strange_logits,
    tokens_that_meet,
)


def positions_of(trees: list[list[int]], first: int) -> torch.Tensor:
    return torch.tensor(
        [[first + len(chain_of(t, i)) - 1 if p > -2 else 0 for i, p in enumerate(t)] for t in trees]
    )


def accept(logits, trees, temperature, tokens=None, seed=5, sample=0, first=40):
    batch, nodes, _ = logits.shape
    tokens = torch.zeros(batch, nodes, dtype=torch.int64) if tokens is None else tokens
    return accept_tree(
        logits,
        tokens,
        torch.tensor(trees),
        positions_of(trees, first),
        torch.tensor(temperature),
        torch.full((batch,), seed),
        torch.full((batch,), sample),
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_accepted_path_follows_the_drawn_tokens(data):
    batch = data.draw(st.integers(1, 3))
    trees = data.draw(parents(max_nodes=10, batch=batch))
    temperature = data.draw(st.lists(st.sampled_from([0.0, 0.7]), min_size=batch, max_size=batch))
    nodes = len(trees[0])
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(batch, nodes, 50, generator=generator)
    drawn = accept(logits, trees, temperature).drawn.tolist()
    hits = data.draw(st.lists(st.booleans(), min_size=nodes, max_size=nodes))
    tokens = [tokens_that_meet(drawn[b], trees[b], hits) for b in range(batch)]

    result = accept(logits, trees, temperature, torch.tensor(tokens))
    assert result.drawn.tolist() == drawn
    for b in range(batch):
        path = path_by_definition(drawn[b], tokens[b], trees[b])
        assert result.path[b].tolist() == path + [-1] * (nodes - len(path))
        assert int(result.count[b]) == len(path)
        assert int(result.token[b]) == drawn[b][path[-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
@pytest.mark.parametrize("kept", [1, 40, 3001])
def test_the_draw_is_the_maximum_of_scaled_logits_plus_noise_whatever_was_filtered(dtype, temperature, kept):
    trees = [[-1, 0, 0, 1]]
    logits = (4 * torch.randn(1, 4, 3001)).to(dtype)
    logits = logits.masked_fill(logits < logits.topk(kept).values[..., -1:], -torch.inf)
    positions = positions_of(trees, 40)[0] + 1
    noise = gumbel_noise_vocab(torch.tensor(5), torch.tensor(0), positions, 3001)
    expected = (logits.float() / temperature + noise).argmax(-1)
    assert torch.equal(accept(logits, trees, [temperature]).drawn, expected)


@settings(max_examples=60, deadline=None)
@given(
    strange_logits(4, [1, 7, 600, 3001]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.sampled_from([None, (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (3000, 0.9, 0.1)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_nan_counts_as_ruled_out_and_of_infinite_logits_the_first_is_drawn(
    rows, temperature, filtered, dtype
):
    rows = rows.to(dtype)
    left = rows.masked_fill(rows.isnan(), -torch.inf).float()
    heat, seed, sample = torch.full((4,), temperature), torch.arange(4), torch.zeros(4, dtype=torch.int64)
    filters = filtered and Filters(*(torch.tensor([x] * 4) for x in filtered))
    drawn = draw_tokens(rows, torch.arange(4), heat, seed, sample, filters=filters)
    if temperature > 0:
        noise = gumbel_noise_vocab(seed, sample, torch.arange(4), rows.shape[1])
        left = left / temperature
        if filters:
            floor = filter_floor_torch(rows[:, None], heat, filters)
            left = left.masked_fill(left < floor, -torch.inf)
        left = left + noise
    assert torch.equal(drawn, left.argmax(-1))


def test_a_node_draws_what_plain_decoding_draws_at_its_position():
    trees = [[-1, 0, 0, 2]]
    logits = torch.randn(1, 4, 600)
    drawn = accept(logits, trees, [1.0]).drawn
    for node, depth in enumerate([0, 1, 1, 2]):
        plain = accept(logits[:, node : node + 1], [[-1]], [1.0], first=40 + depth)
        assert int(plain.token) == int(drawn[0, node])


def test_draws_follow_the_softmax_at_the_temperature():
    logits, draws = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf]), 1500
    tokens = accept_tree(
        logits.expand(draws, 1, 5),
        torch.zeros(draws, 1, dtype=torch.int64),
        torch.full((draws, 1), -1),
        torch.full((draws, 1), 40),
        torch.full((draws,), 1.5),
        torch.arange(draws),
        torch.zeros(draws, dtype=torch.int64),
    ).token
    counts = torch.bincount(tokens, minlength=5).double()
    expected = torch.softmax(logits.double() / 1.5, 0) * draws
    assert counts[4] == 0
    chi_square = ((counts - expected)[:4] ** 2 / expected[:4]).sum()
    assert float(chi_square) < 16.3  # 3 degrees of freedom, one fair run in a thousand is above


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.zeros(1, 1, 1000, dtype=torch.bfloat16)
    logits[0, 0, [777, 300, 999]] = 2.0
    assert int(accept(logits, [[-1]], [0.0]).token) == 300


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 1300), seed=st.integers(0, 1000), values=st.sampled_from([3, 1000]))
def test_first_argmax_is_the_first_maximum(size, seed, values):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(values, (2, 3, size), generator=generator).to(torch.bfloat16)
    expected = (rows == rows.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(first_argmax(rows), expected)
