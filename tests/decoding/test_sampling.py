"""Sampling parameters, what they make of logits at every node, and the distribution that comes of it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels import accept_tree, filter_floor, gumbel_noise
from stages.decoding.sampling import SamplingParams, SamplingTensors, TokenHistory, process_logits
from stages.decoding.tree import DraftTree
from stages.errors import EagleError


def random_logits(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def filtered(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    """Logits [B, N, V] of sequences with these parameters, -inf where their filters rule out."""
    keys = SamplingTensors.of([p.draw_key for p in params], logits.device)
    if keys.filters is None:
        return logits
    floor = filter_floor(logits, keys.temperature, keys.filters)
    heat = torch.where(keys.temperature > 0, keys.temperature, 1.0)[:, None, None]
    return logits.masked_fill(logits / heat < floor[..., None], -torch.inf)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (5, 1.0, 0.0),
        (0, 0.8, 0.0),
        (20, 0.6, 0.0),
        (1000, 0.95, 0.0),
        (0, 1.0, 0.05),
        (50, 0.97, 0.02),
        (0, 0.99, 0.0),
    ],
)
def test_filters_keep_the_tokens_that_transformers_keeps(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(1, 6, 900)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = filtered(logits, [params])[0].isfinite()
    expected = TemperatureLogitsWarper(temperature)(None, logits[0])
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    assert torch.equal(kept, expected.isfinite())


def test_each_sequence_of_a_batch_is_filtered_by_its_own_parameters() -> None:
    logits = random_logits(4, 3, 500)
    params = [
        SamplingParams(top_k=2),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_p=0.5, min_p=0.1),
    ]
    together = filtered(logits, params)
    for row, alone, p in zip(together, logits, params, strict=True):
        assert torch.equal(row, filtered(alone[None], [p])[0])
    assert together[0].isfinite().all()  # greedy
    assert int(together[1].isfinite().sum()) == 6


@pytest.mark.parametrize("temperature", [1e-300, 1e-50, 1e-40, 1e-6])
def test_a_temperature_next_to_none_is_none(temperature: float) -> None:
    """In float32 it would be 0, or make logits infinite."""
    params = SamplingParams(temperature=temperature, top_k=5)
    assert params.temperature == params.draw_key.temperature == 0.0
    assert not params.draw_key.filters


def test_nothing_is_touched_where_nothing_is_asked() -> None:
    logits = random_logits(2, 3, 50).bfloat16()
    assert process_logits(logits, [SamplingParams(), SamplingParams(temperature=1.0)], [None, None]) is logits


@st.composite
def requests(draw: st.DrawFn) -> tuple[SamplingParams, list[int], list[int], DraftTree]:
    """Parameters, prompt, output and a tree below the output's last token, over 20 ids."""
    token = st.integers(0, 19)
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-3.0, 2.0]), max_size=3)),
    )
    prompt = draw(st.lists(token, min_size=1, max_size=6))
    output = draw(st.lists(token, min_size=1, max_size=6))
    tokens, parents, depths = [output[-1]], [-1], [0]
    for _ in range(draw(st.integers(0, 6))):
        parent = draw(st.integers(0, len(tokens) - 1))
        tokens.append(draw(token))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return params, prompt, output, DraftTree(tuple(tokens), tuple(parents), tuple(depths))


@settings(max_examples=60, deadline=None)
@given(requests())
def test_every_node_is_penalised_for_the_tokens_of_its_own_path(
    case: tuple[SamplingParams, list[int], list[int], DraftTree],
) -> None:
    """Against the formulas applied to one node at a time, with its whole text before it."""
    params, prompt, output, tree = case
    logits = random_logits(1, len(tree.tokens) + 1, 20)  # one row of padding
    history = TokenHistory(prompt)
    history.extend(output)
    processed = process_logits(logits, [params], [history], [tree])[0]
    assert torch.equal(processed[-1], logits[0, -1])
    for node in range(len(tree.tokens)):
        path, at = [], node
        while at > 0:
            path.insert(0, tree.tokens[at])
            at = tree.parents[at]
        expected = logits[0, node].clone()
        for token, bias in params.logit_bias.items():
            expected[token] += bias
        text = torch.tensor([prompt + output + path])
        expected = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(text, expected[None])[0]
        for token, count in Counter(output + path).items():
            expected[token] -= params.frequency_penalty * count + params.presence_penalty
        torch.testing.assert_close(processed[node], expected)


def test_a_mask_is_asked_with_each_nodes_own_output() -> None:
    asked = []

    def even_after_odd(output: list[int]) -> Tensor:
        asked.append(list(output))
        return torch.arange(10) % 2 != output[-1] % 2

    history = TokenHistory([1, 2])
    history.extend([5])
    tree = DraftTree((5, 4, 6, 3), (-1, 0, 0, 1), (0, 1, 1, 2))
    params = SamplingParams(temperature=1.0, top_k=3, token_mask=even_after_odd)
    processed = filtered(process_logits(random_logits(1, 4, 10), [params], [history], [tree]), [params])[0]
    assert asked == [[5], [5, 4], [5, 6], [5, 4, 3]]
    for row, last in zip(processed, (5, 4, 6, 3), strict=True):
        kept = row.isfinite().nonzero()[:, 0]
        assert len(kept) == 3
        assert bool((kept % 2 != last % 2).all())


def test_a_mask_that_lets_nothing_follow_and_a_bias_for_no_token_are_refused() -> None:
    nothing = SamplingParams(token_mask=lambda output: torch.zeros(10, dtype=torch.bool))
    with pytest.raises(EagleError, match="lets no token follow output token 0"):
        process_logits(torch.zeros(1, 1, 10), [nothing], [TokenHistory([1])])
    far = SamplingParams(logit_bias={10: 1.0})
    with pytest.raises(EagleError, match="names token 10; the target's ids end at 9"):
        process_logits(torch.zeros(1, 1, 10), [far], [TokenHistory([1])])


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3.0}, "frequency_penalty"),
        ({"logit_bias": {3: math.inf}}, "logit_bias of token 3"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias of token -1"),
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict, name: str) -> None:
    with pytest.raises(EagleError, match=name):
        SamplingParams(**wrong)


# The distribution. A tiny target: seven tokens, the next one's logits depend on the last.

DRAWS = 100_000
VOCAB = 7
TARGET = random_logits(VOCAB, VOCAB, seed=3, scale=1.5)
REQUESTS = {
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.6, top-p": SamplingParams(temperature=0.6, top_p=0.9),
    "top-k, min-p, bias": SamplingParams(temperature=1.4, top_k=5, min_p=0.05, logit_bias={2: 1.0}),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5),
}


def exact_pairs(params: SamplingParams, prompt: list[int]) -> Tensor:
    """Chances of the next two tokens, fp64 [V, V], straight from the definitions."""
    chances = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    first = exact(params, prompt, [])
    for token in range(VOCAB):
        chances[token] = first[token] * exact(params, prompt, [token])
    return chances


def exact(params: SamplingParams, prompt: list[int], output: list[int]) -> Tensor:
    text = prompt + output
    x = TARGET[text[-1]].double().clone()
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(text):
        x[token] = (
            x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        )
    for token in set(output):
        x[token] -= params.presence_penalty
    p = (x / params.temperature).softmax(-1)
    ordered = p.sort(descending=True).values
    if params.top_k:
        p = torch.where(p >= ordered[params.top_k - 1], p, 0)
        p = p / p.sum()
        ordered = p.sort(descending=True).values
    before = ordered.cumsum(0) - ordered
    p = torch.where(p >= ordered[before < params.top_p].min(), p, 0)
    p = torch.where(p >= params.min_p * p.max(), p, 0)
    return p / p.sum()


def processed(params: SamplingParams, prompt: list[int], tree: DraftTree, output: list[int]) -> Tensor:
    """What the nodes' tokens are drawn from, by those that the filters keep: [N, V]."""
    history = TokenHistory(prompt)
    history.extend(output)
    return process_logits(TARGET[list(tree.tokens)][None], [params], [history], [tree])[0]


def drawn(logits: Tensor, position: int, params: SamplingParams, seeds: Tensor) -> Tensor:
    """What a node with these logits [V] draws under each seed, its own token standing at ``position``."""
    logits = filtered(logits[None, None], [params])[0, 0]
    at = torch.full_like(seeds, position + 1)
    noise = gumbel_noise(seeds, torch.zeros_like(seeds), at, torch.arange(VOCAB).expand(len(seeds), -1))
    return (logits / params.temperature + noise).argmax(-1)


def drawn_pairs(params: SamplingParams, prompt: list[int], tree: DraftTree, seeds: Tensor) -> Tensor:
    """The next two tokens under each seed, int64 [draws, 2]: of the tree as far as it was accepted, then
    plainly.

    The draws are those of ``accept_tree``, in one batch: the first are compared.
    """
    logits, root = processed(params, prompt, tree, []), len(prompt) - 1
    at_nodes = torch.stack(
        [drawn(row, root + depth, params, seeds) for row, depth in zip(logits, tree.depths, strict=True)], 1
    )
    few = seeds[:200]
    rows = (tree.tokens, tree.parents, [root + depth for depth in tree.depths])
    tokens, parents, positions = (torch.tensor([row]).expand(len(few), -1) for row in rows)
    keys = SamplingTensors.of([params.draw_key] * len(few), few.device)
    rows = logits.expand(len(few), -1, -1)
    accepted = accept_tree(
        rows, tokens, parents, positions, keys.temperature, few, keys.sample, filters=keys.filters
    )
    assert torch.equal(accepted.drawn, at_nodes[: len(few)])

    first = at_nodes[:, 0]
    second = torch.empty_like(first)
    for token in range(VOCAB):
        here = first == token
        child = next((i for i, p in enumerate(tree.parents) if p == 0 and tree.tokens[i] == token), None)
        if child is not None:
            second[here] = at_nodes[here, child]
        else:
            alone = processed(params, prompt, DraftTree.root_only(token), [token])[0]
            second[here] = drawn(alone, root + 1, params, seeds[here])
    return torch.stack((first, second), 1)


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
@pytest.mark.parametrize("way", ["plain", "drafted"])
def test_tokens_follow_the_exact_distribution(request_: SamplingParams, way: str) -> None:
    """Chi-square of 100,000 pairs of tokens; the quantile is that of one test in 10,000."""
    prompt = [1, 4, 2]
    likely = exact(request_, prompt, []).argsort(descending=True)[[0, 2]].tolist()
    tree = (
        DraftTree.root_only(2)
        if way == "plain"
        else DraftTree((2, *likely, 0, 3), (-1, 0, 0, 1, 1), (0, 1, 1, 2, 2))
    )
    begin = 10 * DRAWS if way == "plain" else 0
    pairs = drawn_pairs(request_, prompt, tree, torch.arange(begin, begin + DRAWS))
    counts = torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2).view(VOCAB, VOCAB)
    expected = exact_pairs(request_, prompt) * DRAWS
    assert int(counts[expected == 0].sum()) == 0
    some = expected >= 5
    chi_square = float(((counts[some] - expected[some]) ** 2 / expected[some]).sum())
    freedom = int(some.sum()) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty
    assert chi_square < bound
