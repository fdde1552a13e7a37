"""Claims about the Triton kernels, on whatever device they run: each against its reference or its definition.

Not collected by name. `test_triton.py` runs this file and `triton_noise.py` in a process of their own under
Triton's interpreter, which must be chosen before triton is imported, and whose bf16 products are wrong, hence
fp16 and fp32 there. `tests/gpu` runs the same claims compiled, in bf16 too.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kernels.accept import Acceptance, accept_states_torch, accept_tree_torch
from kernels.accept_triton import _walk, accept_states_triton, accept_tree_triton
from kernels.compact import compact_torch
from kernels.compact_triton import compact_triton
from kernels.draft_topk import draft_topk_torch
from kernels.draft_topk_triton import draft_topk_triton
from kernels.filters import Filters, filter_floor_torch
from kernels.filters_triton import filter_floor_triton
from kernels.tree_attention_triton import tree_attention_triton
from tests.kernels.trees import (
    ancestor_words,
    attention_by_definition,
    chain_of,
    parents,
    strange_logits,
    tokens_that_meet,
)

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# What is multiplied, and what is only read.
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if CUDA else [torch.float16, torch.float32]
STORED = [torch.bfloat16, torch.float16, torch.float32]
# An interpreted example takes a second, so a failure is shown as found and not shrunk.
quick = settings(
    max_examples=40 if CUDA else 6,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@settings(quick, max_examples=40 if CUDA else 10)
@given(data=st.data())
def test_the_floor_of_the_filters_equals_the_reference(data):
    def each(*values: float) -> torch.Tensor:
        return torch.tensor([data.draw(st.sampled_from(values)) for _ in range(2)])

    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = 3 * torch.randn(2, 1, data.draw(st.sampled_from([7, 300])), generator=generator)
    logits = logits.to(data.draw(st.sampled_from(STORED)))
    filters = Filters(each(0, 1, 5, 2000), each(1.0, 0.5, 0.9), each(0.0, 0.1, 1.0))
    temperature = each(0.0, 0.5, 1.5)
    expected = filter_floor_torch(logits, temperature, filters)
    found = filter_floor_triton(logits.to(DEVICE), temperature.to(DEVICE), on_device(filters))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_of_equal_scores_in_many_tiles_the_walk_takes_the_first():
    nodes, tiles = 64, 70  # more than it reduces at a time
    best = torch.zeros(nodes, tiles, device=DEVICE)
    best[:, :3] = -1.0
    token = torch.arange(tiles, dtype=torch.int32, device=DEVICE).expand(nodes, -1).contiguous() * 1024
    trees = torch.full((1, nodes), -2, device=DEVICE)
    trees[0, 0] = -1
    assert _walk(best, token, trees, trees).drawn.unique().tolist() == [3 * 1024]


def test_children_without_a_chance_come_last_in_the_order_of_their_index():
    logits = torch.full((1, 50), -torch.inf, device=DEVICE)
    logits[0, [30, 20]] = torch.tensor([1.0, 2.0], device=DEVICE)
    assert draft_topk_triton(logits, torch.zeros(1, device=DEVICE), 4).draft_id.tolist() == [[20, 30, 0, 1]]


@st.composite
def verifications(draw: st.DrawFn):
    """Logits of random trees, the rest of `accept_tree`'s tensors, filters and allowed tokens, maybe."""
    batch = draw(st.integers(1, 3))
    trees = draw(parents(max_nodes=5, batch=batch))
    nodes, vocab_size = len(trees[0]), draw(st.sampled_from([7, 1024, 1500]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = 3 * torch.randn(batch, nodes, vocab_size, generator=generator)
    if draw(st.booleans()):
        logits = logits.masked_fill(logits < logits.topk(3).values[..., -1:], -torch.inf)
    positions = [[9 + len(chain_of(t, i)) if p > -2 else 0 for i, p in enumerate(t)] for t in trees]

    def each(*values: float) -> torch.Tensor:
        return torch.tensor(draw(st.lists(st.sampled_from(values), min_size=batch, max_size=batch)))

    rest = (torch.tensor(trees), torch.tensor(positions), each(0.0, 0.5, 1.0))
    keys = (torch.arange(batch) + 2**40, torch.arange(batch))
    filters, allowed = None, None
    if draw(st.booleans()):
        filters = Filters(each(0, 1, 5, 2000), each(1.0, 0.5, 0.9), each(0.0, 0.1, 1.0))
    if draw(st.booleans()):
        shape = (batch, nodes, -(-vocab_size // 32))
        allowed = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
        allowed[..., 0] |= 4
    hits = draw(st.lists(st.sampled_from([True, True, False]), min_size=nodes, max_size=nodes))
    return logits.to(draw(st.sampled_from(STORED))), (*rest, *keys), filters, allowed, hits


def on_device(filters: Filters | None) -> Filters | None:
    if filters is None:
        return None
    return Filters(filters.top_k.to(DEVICE), filters.top_p.to(DEVICE), filters.min_p.to(DEVICE))


def assert_same(result: Acceptance, expected: Acceptance) -> None:
    for name in ("path", "count", "token", "drawn"):
        assert torch.equal(getattr(result, name).cpu(), getattr(expected, name)), name


@settings(quick, max_examples=40 if CUDA else 10)
@given(case=verifications())
def test_acceptance_equals_the_reference(case):
    logits, rest, filters, allowed, hits = case
    options = {"filters": filters, "allowed": allowed}
    trees = rest[0]
    drawn = accept_tree_torch(logits, torch.zeros_like(trees), *rest, **options).drawn.tolist()
    tokens = torch.tensor([tokens_that_meet(d, t, hits) for d, t in zip(drawn, trees.tolist(), strict=True)])
    expected = accept_tree_torch(logits, tokens, *rest, **options)
    result = accept_tree_triton(
        *(t.to(DEVICE) for t in (logits, tokens, *rest)),
        filters=on_device(filters),
        allowed=None if allowed is None else allowed.to(DEVICE),
    )
    assert_same(result, expected)


@settings(quick, max_examples=60 if CUDA else 12)
@given(
    strange_logits(2, [7, 1500]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([None, (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1)]),
)
def test_nan_and_infinite_logits_are_drawn_from_as_the_reference_draws(rows, temperature, filtered):
    filters = filtered and Filters(*(torch.tensor([x, x]) for x in filtered))
    roots, root = torch.full((2, 1), -1), torch.zeros(2, 1, dtype=torch.int64)
    rest = (root, roots, root + 9, torch.full((2,), temperature), torch.arange(2), torch.arange(2))
    expected = accept_tree_torch(rows[:, None], *rest, filters=filters)
    given_rest = (t.to(DEVICE) for t in rest)
    result = accept_tree_triton(rows[:, None].to(DEVICE), *given_rest, filters=on_device(filters))
    assert_same(result, expected)


@quick
@given(case=verifications(), width=st.sampled_from([16, 40, 64]), softcap=st.none() | st.just(4.0))
def test_acceptance_of_states_equals_that_of_their_logits(case, width, softcap):
    logits, rest, _, allowed, hits = case
    batch, nodes = logits.shape[:2]
    vocab_size = min(logits.shape[2], 200)
    allowed = None if allowed is None else allowed[..., : -(-vocab_size // 32)]
    generator = torch.Generator().manual_seed(width)
    states = torch.randn(batch, nodes, width, generator=generator)
    weight = torch.randn(vocab_size, width, generator=generator)
    options = {"scale": 0.5, "softcap": softcap}
    trees = rest[0]
    drawn = accept_states_torch(
        states, weight, torch.zeros_like(trees), *rest, **options, allowed=allowed
    ).drawn
    tokens = [tokens_that_meet(d, t, hits) for d, t in zip(drawn.tolist(), trees.tolist(), strict=True)]
    expected = accept_states_torch(states, weight, torch.tensor(tokens), *rest, **options, allowed=allowed)
    result = accept_states_triton(
        *(t.to(DEVICE) for t in (states, weight, torch.tensor(tokens), *rest)),
        **options,
        allowed=None if allowed is None else allowed.to(DEVICE),
    )
    assert_same(result, expected)


@settings(quick, max_examples=40 if CUDA else 12)
@given(data=st.data())
def test_the_best_children_equal_the_reference(data):
    nodes, vocab_size = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([5, 300, 4500]))
    k = min(data.draw(st.sampled_from([1, 3, 8, 10])), vocab_size)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = (3 * torch.randn(nodes, vocab_size, generator=generator)).to(data.draw(st.sampled_from(STORED)))
    options = {}
    if data.draw(st.booleans()):
        options["target_ids"] = torch.randperm(50_000, generator=generator)[:vocab_size].sort().values
    if data.draw(st.booleans()):
        options["temperature"] = torch.tensor([0.0, 0.7, 1.0, 1.5])[:nodes]
        if data.draw(st.booleans()):
            options["strength"] = torch.tensor([0.5, 0.5, 1.0, 0.0])[:nodes]
            options |= dict.fromkeys(("positions", "seed", "sample"), torch.arange(nodes) + 2**33)
    scores = -torch.rand(nodes, generator=generator)
    expected = draft_topk_torch(logits, scores, k, **options)
    device_options = {name: t.to(DEVICE) for name, t in options.items()}
    result = draft_topk_triton(logits.to(DEVICE), scores.to(DEVICE), k, **device_options)
    assert torch.equal(result.draft_id.cpu(), expected.draft_id)
    assert torch.equal(result.token.cpu(), expected.token)
    torch.testing.assert_close(result.score.cpu(), expected.score, rtol=1e-5, atol=1e-5)


def test_equal_children_come_in_the_order_of_their_index():
    logits = torch.zeros(1, 9000, device=DEVICE)
    logits[0, [8999, 5000, 4000, 17]] = 1.0
    best = draft_topk_triton(logits, torch.zeros(1, device=DEVICE), 6)
    assert best.draft_id.tolist() == [[17, 4000, 5000, 8999, 0, 1]]


def test_greedy_acceptance_takes_the_lowest_id_among_equals_within_and_across_tiles():
    logits = torch.zeros(1, 1, 70_000, device=DEVICE)
    logits[0, 0, [69_000, 40_007, 40_001]] = 1.0
    integers = [torch.tensor(x, device=DEVICE) for x in ([[0]], [[-1]], [[5]])]
    keys = [torch.tensor([0], device=DEVICE)] * 2
    result = accept_tree_triton(logits, *integers, torch.tensor([0.0], device=DEVICE), *keys)
    assert int(result.token) == 40_001


@settings(quick, max_examples=60 if CUDA else 20)
@given(data=st.data())
def test_attention_equals_its_definition(data):
    batch = data.draw(st.integers(1, 2))
    trees = data.draw(parents(max_nodes=data.draw(st.sampled_from([1, 6, 20])), batch=batch))
    nodes = len(trees[0])
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 15, 16, 17, 63, 90]), min_size=batch, max_size=batch))
    slots = data.draw(st.permutations(range(3)))[:batch]
    group, kv_heads, dim = data.draw(st.sampled_from([(1, 1, 8), (3, 1, 20), (2, 2, 16)]))
    window = data.draw(st.none() | st.sampled_from([1, 4, 30]))
    softcap = data.draw(st.none() | st.just(2.0))
    splits = data.draw(st.sampled_from([1, 2, 5]))
    dtype = data.draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    cache = torch.randn(2, 2, 3, kv_heads, 112, dim, generator=generator).to(DEVICE, dtype)
    query = (
        torch.randn(batch, nodes, group * kv_heads, dim, generator=generator)
        .to(DEVICE, dtype)
        .transpose(1, 2)
    )
    out = tree_attention_triton(
        query,
        cache[0, 1],
        cache[1, 1],
        torch.tensor(slots, device=DEVICE),
        torch.tensor(lengths, device=DEVICE),
        ancestor_words(trees).to(DEVICE),
        0.3,
        sliding_window=window,
        softcap=softcap,
        splits=splits,
    )
    expected = attention_by_definition(
        query, cache[0, 1], cache[1, 1], slots, lengths, trees, 0.3, window, softcap
    )
    tolerance = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)


def test_attention_takes_64_nodes_and_a_slice_of_slots_and_a_window_over_tiles_of_the_prefix():
    trees = [[-1, *range(63)]]
    cache, query = torch.randn(2, 2, 1, 140, 8, device=DEVICE), torch.randn(1, 1, 64, 8, device=DEVICE)
    lengths, words = torch.tensor([70], device=DEVICE), ancestor_words(trees).to(DEVICE)
    out = tree_attention_triton(query, *cache, slice(1, 2), lengths, words, 0.3, splits=1, sliding_window=40)
    expected = attention_by_definition(query, cache[0], cache[1], [1], [70], trees, 0.3, 40)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 256])
def test_attention_of_every_head_size(dim):
    trees = [[-1, 0, 0]]
    cache, query = torch.randn(2, 1, 1, 90, dim, device=DEVICE), torch.randn(1, 2, 3, dim, device=DEVICE)
    place = torch.tensor([0], device=DEVICE), torch.tensor([80], device=DEVICE)
    words = ancestor_words(trees).to(DEVICE)
    out = tree_attention_triton(query, *cache, *place, words, dim**-0.5, splits=2)
    expected = attention_by_definition(query, cache[0], cache[1], [0], [80], trees, dim**-0.5)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("splits", [1, 2, 5, 9])
def test_merging_survives_scores_that_no_exponential_holds(splits):
    """Scores of hundreds in one split, of thousands below in others, and splits without a row."""
    cache, query = torch.randn(2, 1, 1, 60, 8, device=DEVICE), torch.ones(1, 1, 1, 8, device=DEVICE)
    cache[0, 0, 0, :, :] = -400.0
    cache[0, 0, 0, 20] = 60.0
    cache[0, 0, 0, 21] = 60.01
    place = torch.tensor([0], device=DEVICE), torch.tensor([50], device=DEVICE)
    words = ancestor_words([[-1]]).to(DEVICE)
    out = tree_attention_triton(query, *cache, *place, words, 1.0, splits=splits)
    expected = attention_by_definition(query, cache[0], cache[1], [0], [50], [[-1]], 1.0)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-3, atol=1e-3)


def test_attention_of_a_level_reaches_the_levels_written_before_it():
    trees = [[-1, 0, 0, 1, 2, 3]]
    cache, query = torch.randn(2, 1, 2, 40, 8, device=DEVICE), torch.randn(1, 4, 6, 8, device=DEVICE)
    place = torch.tensor([0], device=DEVICE), torch.tensor([20], device=DEVICE)
    words = ancestor_words(trees).to(DEVICE)[:, 3:]
    for window in (None, 3):
        expected = attention_by_definition(query, cache[0], cache[1], [0], [20], trees, 0.3, window)
        out = tree_attention_triton(
            query[:, :, 3:], *cache, *place, words, 0.3, tree_rows=6, sliding_window=window
        )
        torch.testing.assert_close(out.cpu().double(), expected[:, :, 3:], rtol=3e-5, atol=3e-5)


@settings(quick, max_examples=40 if CUDA else 20)
@given(data=st.data())
def test_compaction_equals_the_reference(data):
    batch, nodes = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([2, 9, 30]))
    left_out = st.sets(st.integers(1, nodes - 1), max_size=8)
    paths = [sorted(set(range(nodes)) - data.draw(left_out)) for _ in range(batch)]
    cache = torch.randn(2, 1, 3, 2, 42, 10)
    args = (
        torch.tensor(data.draw(st.permutations(range(3)))[:batch]),
        torch.tensor(data.draw(st.lists(st.integers(0, 11), min_size=batch, max_size=batch))),
        torch.tensor([p + [-1] * (nodes - len(p)) for p in paths]),
        torch.tensor([len(p) for p in paths]),
    )
    moved = cache.to(DEVICE, copy=True)
    compact_triton(moved, *(a.to(DEVICE) for a in args))
    compact_torch(cache, *args)
    assert torch.equal(moved.cpu(), cache)
