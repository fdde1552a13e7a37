"""Model families of transformers, tiny and random: sliding windows, capped scores, experts, wide heads."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GraniteConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    StableLmConfig,
)

from stages.decoding import SamplingParams
from stages.errors import EagleError
from stages.targets import Target, load_target
from stages.targets.attention import SLOT_ATTENTION
from tests.decoding.oracle import OracleDrafter
from tests.decoding.test_engine import decode, decoder, random_prompt

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 299,
    "pad_token_id": 298,
}
FAMILIES = {
    "cohere, scaled logits": CohereConfig(**SIZES, logit_scale=0.25),
    "gemma 2, window and caps": Gemma2Config(
        **SIZES, head_dim=16, sliding_window=10, query_pre_attn_scalar=16, attn_logit_softcapping=2.0
    ),
    "gemma 3, window and wide heads": Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=10),
    "granite, scaled logits": GraniteConfig(**SIZES, logits_scaling=4.0),
    "mistral, window": MistralConfig(**SIZES, head_dim=16, sliding_window=12),
    "mixtral, experts": MixtralConfig(**SIZES, num_local_experts=4),
    "phi, partial rotation": PhiConfig(**SIZES),
    "phi 3, fused projections": Phi3Config(**SIZES),
    "qwen 2, biases": Qwen2Config(**SIZES),
    "qwen 3, experts": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=32
    ),
}


def build(config: PreTrainedConfig, attention: str) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=attention, dtype=torch.float32
        )
    model.generation_config = GenerationConfig(eos_token_id=299, pad_token_id=298)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_decodes_as_transformers_does_and_the_same_with_a_draft(family: str) -> None:
    target = Target(
        name=family,
        model=build(FAMILIES[family], SLOT_ATTENTION),
        tokenizer=SimpleNamespace(eos_token_id=299),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    reference, source, loop, accepted = build(FAMILIES[family], "eager"), random.Random(0), decoder(target), 0
    for seed in range(3):
        prompt = random_prompt(source, target)
        for temperature in (0.0, 0.9):
            params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed)
            plain, _ = decode(loop, prompt, params)
            oracle = OracleDrafter(plain, target.vocab_size, right=0.8, seed=seed)
            drafted, stats = decode(loop, prompt, params, oracle)
            assert drafted == plain
            accepted += stats.accepted
            if temperature == 0:
                ids = torch.tensor([prompt])
                expected = reference.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
                )
                assert plain == expected[0, len(prompt) :].tolist()
    assert accepted > 10


def test_a_family_whose_attention_cannot_be_replaced_is_refused(tmp_path, tiny_path: str) -> None:
    build(StableLmConfig(**SIZES), "eager").save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(tiny_path) / name).read_bytes())
    with pytest.raises(EagleError, match="StableLmForCausalLM, whose attention cannot be replaced"):
        load_target(str(tmp_path), device="cpu", dtype="float32")
