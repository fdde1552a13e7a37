from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stages.train import loss
from stages.train.loss import StepLosses, TargetLogits, reference_soft_cross_entropy, soft_cross_entropy

STEPS, QUERIES, HIDDEN, VOCAB = 3, 23, 16, 40


def make_case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, TargetLogits, Tensor]:
    random = torch.Generator().manual_seed(0)
    states = torch.randn(STEPS, QUERIES, HIDDEN, generator=random).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=random, requires_grad=True)
    last = torch.randn(QUERIES, HIDDEN, generator=random).to(dtype)
    rows, bias = (
        torch.randn(VOCAB, HIDDEN, generator=random).to(dtype),
        torch.randn(VOCAB, generator=random).to(dtype),
    )
    target = TargetLogits(last, rows, bias, scale=0.7, softcap=5.0, labels=torch.zeros(0))
    labels = target.logits(torch.arange(QUERIES)).argmax(-1)
    labels[[0, 7, 8, QUERIES - 1]] = -1  # outside the draft vocabulary
    counted = torch.ones(STEPS, QUERIES, dtype=torch.bool)
    for step in range(STEPS):  # turns end after positions 4 and 22
        counted[step, 5 - step : 5] = False
        counted[step, QUERIES - step :] = False
    return states, weight, TargetLogits(last, rows, bias, 0.7, 5.0, labels), counted


def run(function, states: Tensor, weight: Tensor, target: TargetLogits, counted: Tensor):
    total, parts = function(states, weight, target, counted, 0.8)
    return total.detach(), parts, torch.autograd.grad(total * 3, (states, weight))


def assert_equal(a: StepLosses, b: StepLosses, **tolerance: float) -> None:
    torch.testing.assert_close(a.loss_sum, b.loss_sum, **tolerance)
    assert a.counted.equal(b.counted)
    assert a.agreed.equal(b.agreed)
    assert a.asked.equal(b.asked)


@pytest.mark.parametrize("pieces", [1, 4])
def test_loss_and_gradients_equal_the_plain_formula(pieces: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", STEPS * QUERIES * VOCAB // pieces)
    monkeypatch.setattr(loss, "CACHED_LOGITS", 2 * STEPS * VOCAB)
    case = make_case()
    total, parts, gradients = run(soft_cross_entropy, *case)
    expected, expected_parts, expected_gradients = run(reference_soft_cross_entropy, *case)
    torch.testing.assert_close(total, expected)
    assert_equal(parts, expected_parts)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-6)


def test_bfloat16_differs_from_float32_by_its_rounding_only():
    states, weight, target, counted = make_case(torch.bfloat16)
    total, _, gradients = run(soft_cross_entropy, states, weight, target, counted)
    exact = TargetLogits(
        target.last.float(), target.weight.float(), target.bias.float(), 0.7, 5.0, target.labels
    )
    expected, _, references = run(reference_soft_cross_entropy, states.float(), weight, exact, counted)
    torch.testing.assert_close(total, expected, rtol=0.02, atol=0)
    for gradient, reference in zip(gradients, references, strict=True):
        assert (gradient.float() - reference).norm() < 0.02 * reference.norm()


def test_labels_outside_the_draft_vocabulary_are_misses_and_not_in_the_loss():
    states, weight, target, counted = make_case()
    _, parts, (gradient, _) = run(soft_cross_entropy, states, weight, target, counted)
    assert parts.asked.tolist() == [23, 21, 19]
    assert parts.counted.tolist() == [19, 18, 16]
    assert not gradient[0, 7].any()
    assert not gradient[1, 6].any()
    assert not gradient[2, 5].any()
    assert gradient[1, 5].any()


@pytest.mark.parametrize("function", [soft_cross_entropy, reference_soft_cross_entropy])
def test_a_batch_whose_labels_are_all_outside_the_draft_vocabulary_has_loss_zero(function):
    states, weight, target, counted = make_case()
    total, parts, gradients = run(
        function, states, weight, replace(target, labels=target.labels * 0 - 1), counted
    )
    assert total == 0
    assert parts.asked.tolist() == [23, 21, 19]
    assert parts.counted.tolist() == [0, 0, 0]
    assert not any(gradient.any() for gradient in gradients)
