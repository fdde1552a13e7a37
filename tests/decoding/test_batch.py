"""Batched plain decoding: each answer is the one the prompt gets alone."""

from __future__ import annotations

import random

import pytest

from stages.decoding import EagleModel, GenerationRequest, SamplingParams, generate_batch
from stages.errors import EagleError
from stages.targets import Target


@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_batched_answers_equal_single_ones_whatever_the_batch(tiny_target: Target, max_batch: int) -> None:
    source, model = random.Random(0), EagleModel(tiny_target)
    requests = [
        GenerationRequest(
            str(i),
            [source.randrange(500) for _ in range(source.randint(1, 80))],
            SamplingParams(
                max_new_tokens=source.randint(1, 30), temperature=source.choice([0.0, 0.9]), seed=i
            ),
        )
        for i in range(20)
    ]
    results = {result.id: result for result in generate_batch(tiny_target, requests, max_batch)}
    assert len(results) == len(requests)
    for request in requests:
        alone = model.generate(request.prompt_ids, request.params)
        assert results[request.id].token_ids == alone.token_ids
        assert results[request.id].finish_reason == alone.finish_reason


def test_a_prompt_longer_than_the_context_is_named(tiny_target: Target) -> None:
    with pytest.raises(EagleError, match="prompt x has 600 tokens"):
        list(generate_batch(tiny_target, [GenerationRequest("x", [1] * 600, SamplingParams())]))


def test_long_prompts_are_prefilled_in_chunks_with_the_same_answers(tiny_target: Target, monkeypatch) -> None:
    requests = [
        GenerationRequest(str(n), list(range(n)), SamplingParams(max_new_tokens=12))
        for n in (70, 33, 32, 31, 5)
    ]
    whole = {r.id: r.token_ids for r in generate_batch(tiny_target, requests)}
    monkeypatch.setattr("stages.decoding.engine.PREFILL_ROWS", 16)
    assert {r.id: r.token_ids for r in generate_batch(tiny_target, requests)} == whole
