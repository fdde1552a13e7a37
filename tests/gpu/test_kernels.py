"""The Triton kernels compiled for the GPU at hand: the interpreter's claims, bf16, real models' sizes."""

from __future__ import annotations

import pytest
import torch

from kernels import (
    Filters,
    accept_states,
    accept_tree,
    compact,
    draft_topk,
    gumbel_noise,
    gumbel_noise_vocab,
    tree_attention,
)
from kernels.accept import accept_tree_torch
from tests.kernels.trees import ancestor_words, attention_by_definition

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]

if torch.cuda.is_available():
    from tests.kernels.triton_noise import *  # noqa: F403
    from tests.kernels.triton_ops import *  # noqa: F403


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (32, 8, 128), (8, 4, 256)])
@pytest.mark.parametrize("nodes", [1, 8, 60])
def test_bf16_attention_of_a_real_model_s_shape_equals_float64(heads, kv_heads, dim, nodes):
    trees = [[-1] + [(i - 1) // 2 for i in range(1, nodes)]] * 2
    cache = torch.randn(2, 3, kv_heads, 1500, dim, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(2, heads, nodes, dim, device="cuda", dtype=torch.bfloat16)
    lengths = [1400, 333]
    out = tree_attention(
        query,
        *cache,
        torch.tensor([2, 0], device="cuda"),
        torch.tensor(lengths, device="cuda"),
        ancestor_words(trees).cuda(),
        dim**-0.5,
    )
    expected = attention_by_definition(query, cache[0], cache[1], [2, 0], lengths, trees, dim**-0.5)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-2, atol=5e-3)


def test_acceptance_over_a_real_vocabulary_equals_torch_on_the_cpu():
    nodes, vocab_size = 32, 151_936
    logits = (4 * torch.randn(2, nodes, vocab_size)).bfloat16()
    parents = torch.tensor([[-1, *range(nodes - 1)]] * 2)
    positions = torch.arange(nodes).expand(2, -1) + 100
    rest = (parents, positions, torch.tensor([0.0, 0.9]), torch.tensor([1, 2**50]), torch.tensor([0, 3]))
    drawn = accept_tree_torch(logits, torch.zeros_like(parents), *rest).drawn
    tokens = torch.cat([torch.zeros(2, 1, dtype=torch.int64), drawn[:, :-1]], 1)
    tokens[1, 20] = -1
    result = accept_tree(*(t.cuda() for t in (logits, tokens, *rest)))
    assert torch.equal(result.drawn.cpu(), drawn)
    assert result.count.tolist() == [nodes, 20]
    assert result.token.tolist() == [int(drawn[0, -1]), int(drawn[1, 19])]


def test_no_op_waits_for_the_gpu():
    cache = torch.randn(2, 2, 2, 2, 64, 16, device="cuda")
    query, logits = torch.randn(1, 4, 3, 16, device="cuda"), torch.randn(1, 3, 2000, device="cuda")
    parents, words = torch.tensor([[-1, 0, 0]], device="cuda"), torch.tensor([[1, 3, 5]], device="cuda")
    slots, lengths = torch.tensor([1], device="cuda"), torch.tensor([20], device="cuda")
    temperature = torch.tensor([1.0], device="cuda")
    filters = Filters(lengths, temperature / 2, temperature / 2)
    states, weight = torch.randn(1, 3, 64, device="cuda"), torch.randn(2000, 64, device="cuda")
    keys = (parents, words, temperature, slots, slots)

    def cycle() -> None:
        draft_topk(logits[0], temperature.expand(3), 4)
        tree_attention(query, cache[0, 0], cache[1, 0], slots, lengths, words, 0.25)
        accept_states(states, weight, parents, *keys)
        accept_tree(logits, parents, *keys)
        accepted = accept_tree(logits, parents, *keys, filters=filters)
        compact(cache, slots, lengths, accepted.path, accepted.count)
        gumbel_noise(slots, slots, slots, parents)
        gumbel_noise_vocab(slots, slots, slots, 2000)

    cycle()  # compiling may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        cycle()
    finally:
        torch.cuda.set_sync_debug_mode("default")
