from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Filters, accept_tree, allowed_tokens, filter_floor


def kept_by_definition(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """Token ids left by top-k, then top-p, then min-p, of one node."""
    x = [value / temperature for value in logits]
    order = sorted(range(len(x)), key=lambda i: -x[i])
    kept = {i for i in order if top_k == 0 or x[i] >= x[order[min(top_k, len(x)) - 1]]}
    mass = {i: math.exp(x[i] - x[order[0]]) for i in kept}
    total, reached, last = sum(mass.values()), 0.0, order[0]
    for i in order:
        if i in kept and reached < top_p * total:
            last, reached = i, reached + mass[i]
    if top_p < 1:
        kept = {i for i in kept if x[i] >= x[last]}
    return {i for i in kept if min_p == 0 or x[i] >= x[order[0]] + math.log(min_p)}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 40),
    distinct=st.sampled_from([3, 1000]),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([1.0, 0.05, 0.51, 0.93]),
    min_p=st.sampled_from([0.0, 0.031, 1.0]),
)
def test_the_floor_keeps_what_the_filters_keep(seed, size, distinct, temperature, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-distinct, distinct, (1, 1, size), generator=generator) / distinct * 6
    heat = torch.tensor([temperature])
    filters = Filters(torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))
    floor = filter_floor(logits, heat, filters)
    kept = (logits / heat >= floor[..., None]).flatten().nonzero().flatten().tolist()
    assert set(kept) == kept_by_definition(logits.flatten().tolist(), temperature, top_k, top_p, min_p)


def test_greedy_nodes_have_no_floor():
    filters = Filters(torch.tensor([1, 1]), torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]))
    floor = filter_floor(torch.randn(2, 3, 9), torch.tensor([0.0, 1.0]), filters)
    assert torch.all(floor[0] == -torch.inf)
    assert torch.all(floor[1] > -torch.inf)


def test_packed_words_allow_the_tokens_of_their_bits():
    words = torch.tensor([[5, -(2**31)], [0, 1]], dtype=torch.int32)
    assert [row.nonzero().flatten().tolist() for row in allowed_tokens(words, 64)] == [[0, 2, 63], [32]]
    assert allowed_tokens(words, 40).shape == (2, 40)


def test_only_allowed_and_kept_tokens_are_drawn():
    draws = 300
    logits = torch.tensor([2.0, 1.9, 1.8, 1.7, 5.0]).expand(draws, 1, 5)
    allowed = torch.tensor([0b01111], dtype=torch.int32).expand(draws, 1, 1)
    filters = Filters(*(torch.full((draws,), x) for x in (3, 1.0, 0.0)))
    tokens = accept_tree(
        logits,
        *(torch.full((draws, 1), x) for x in (0, -1, 7)),
        torch.ones(draws),
        torch.arange(draws),
        torch.zeros(draws, dtype=torch.int64),
        filters=filters,
        allowed=allowed,
    ).token
    assert set(tokens.tolist()) == {0, 1, 2}
