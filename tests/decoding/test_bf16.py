"""In bfloat16 too a CPU gives the very same tokens with and without a draft, whatever runs beside them."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import GenerationConfig

from kernels.cpu import load_ops
from stages.decoding import GenerationRequest, SamplingParams, generate_batch
from stages.targets import SlotCache, SlotForward, Target, load_target
from tests.decoding.oracle import OracleDrafter
from tests.decoding.test_engine import decode, decoder, random_prompt
from tests.decoding.test_families import FAMILIES, build
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.skipif(load_ops() is not None, reason=f"no CPU ops: {load_ops()}")

FUSED = ["gemma 2, window and caps", "gemma 3, window and wide heads", "mistral, window", "qwen 2, biases"]
BY_MODULE = ["granite, scaled logits", "phi 3, fused projections"]


@pytest.mark.parametrize("family", FUSED + BY_MODULE)
def test_drafted_and_batched_tokens_are_those_of_plain_decoding(family: str) -> None:
    model = build(FAMILIES[family], "eagle_slots").to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=299, pad_token_id=298)
    target = Target(family, model, _NoTokenizer(), torch.device("cpu"), torch.bfloat16)
    assert target.cpu is not None
    assert (target.cpu.decoder is not None) == (family in FUSED)
    source, engine, accepted = random.Random(0), decoder(target), 0
    requests, outputs = [], {}
    for seed in range(5):
        prompt, temperature = random_prompt(source, target), (0.0, 0.8)[seed % 2]
        params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=seed)
        plain, _ = decode(engine, prompt, params)
        oracle = OracleDrafter(plain, target.vocab_size, right=0.8, seed=seed)
        drafted, stats = decode(engine, prompt, params, oracle)
        assert drafted == plain
        accepted += stats.accepted
        requests.append(GenerationRequest(str(seed), prompt, params))
        outputs[str(seed)] = plain
    assert accepted > 20
    assert {r.id: r.token_ids for r in generate_batch(target, requests, max_batch=3)} == outputs


class _NoTokenizer:
    eos_token_id = 299


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_node_has_the_bits_of_the_token_decoded_alone(folder: str, dtype: str) -> None:
    """Its state and its keys and values, whatever the number of keys leaves over at the end of a loop."""
    target = load_target(folder, device="cpu", dtype=dtype)
    cache = SlotCache.for_model(target.config, slots=1, rows=128, dtype=target.dtype, device=target.device)
    forward, count = SlotForward(target, cache, layers=None), 20
    tokens = torch.arange(count) * 3
    for prefix in (*range(15, 24), 30, 31, 32, 63):
        cache.data.normal_()
        before = cache.data.clone()
        words = torch.tensor([1, *(1 | 1 << i for i in range(1, count))])
        nodes = prefix + torch.arange(count)
        places = torch.stack((nodes * 0, nodes, nodes * 0 + prefix, words), -1)
        positions = torch.tensor([prefix] + [prefix + 1] * (count - 1))
        together = forward.rows(tokens, positions, places).last.clone()
        kept = cache.data[:, :, 0, :, prefix : prefix + count].clone()
        cache.data.copy_(before)
        root = forward.rows(tokens[:1], positions[:1], torch.tensor([[0, prefix, prefix, 1]]))
        assert torch.equal(root.last[0], together[0])
        for i in range(1, count):
            alone = torch.tensor([[0, prefix + 1, prefix + 1, 1]])
            state = forward.rows(tokens[i : i + 1], positions[i : i + 1], alone).last[0]
            assert torch.equal(state, together[i])
            assert torch.equal(cache.data[:, :, 0, :, prefix + 1], kept[:, :, :, i])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_target(tmp_path_factory.mktemp("bits") / "target"))
