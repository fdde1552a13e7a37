"""Sampling parameters and logit filters."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from stages.decoding.sampling import SamplingParams, filter_logits


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.8), (20, 0.6), (1000, 0.95)])
def test_filters_keep_the_tokens_that_transformers_keeps(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(1, 6, 300, generator=torch.Generator().manual_seed(0)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    kept = filter_logits(logits, [params])[0].isfinite()
    expected = TemperatureLogitsWarper(temperature)(None, logits[0])
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(kept, expected.isfinite())


def test_greedy_requests_are_not_filtered() -> None:
    logits = torch.randn(2, 1, 50)
    params = [SamplingParams(top_k=2), SamplingParams(temperature=1.0, top_k=2)]
    filtered = filter_logits(logits, params)
    assert filtered[0].isfinite().all()
    assert int(filtered[1].isfinite().sum()) == 2


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}]
)
def test_parameters_out_of_range_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
