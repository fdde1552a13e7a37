"""The embedded target in float32: 20 prompts of 64 tokens, with the head and without, token for token."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from stages.decoding import EagleModel, SamplingParams, TreeConfig
from stages.heads import Eagle3Config, Eagle3Head, init_from_target
from stages.prompts import read_prompts
from stages.targets import Target, load_target

HEADS = [os.environ.get("EAGLE_TEST_HEAD", ""), "runs/larger/head", "runs/demo/head"]


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("builtin:smollm2", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def model(target: Target) -> EagleModel:
    """With a trained head where there is one, else with one that starts from the target's output rows."""
    for head in filter(None, HEADS):
        if (Path(head) / "manifest.json").is_file():
            return EagleModel.from_pretrained(target, head)
    torch.manual_seed(0)
    head = Eagle3Head(Eagle3Config.from_target(target.config, target.vocab_size))
    weights = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight,
        "norm.weight": target.decoder.norm.weight,
    }
    init_from_target(head, weights)
    return EagleModel(target, head.eval(), TreeConfig.parse("dynamic:min_prob=0,expand_prob=0"))


def prompts(target: Target) -> list[list[int]]:
    chosen = read_prompts("builtin:eval")[:20]
    return [target.render([{"role": "user", "content": prompt.turns[0]}]) for prompt in chosen]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_twenty_prompts_are_answered_the_same_with_and_without_the_head(
    model: EagleModel, target: Target, temperature: float
) -> None:
    params = SamplingParams(max_new_tokens=64, temperature=temperature, seed=11)
    accepted = 0
    for ids in prompts(target):
        plain = model.generate(ids, params, speculative=False)
        drafted = model.generate(ids, params)
        assert drafted.token_ids == plain.token_ids
        accepted += drafted.stats.accepted
        if temperature == 0:
            tensor = torch.tensor([ids])
            generated = target.model.generate(
                tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=64, do_sample=False
            )
            assert plain.token_ids == generated[0, len(ids) :].tolist()
    assert accepted > 0
