from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.train import loss
from stages.train.config import LossKind
from stages.train.loss import StepLosses, TargetLogits, draft_loss, pairs_in_loss, reference_draft_loss
from stages.train.objective import LEAST_OVERLAP, objective, reference_objective

STEPS, QUERIES, HIDDEN, VOCAB = 3, 23, 16, 40
LOSSES = get_args(LossKind)


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


def run(
    function, states: Tensor, weight: Tensor, target: TargetLogits, counted: Tensor, kind="cross-entropy"
):
    step_weights = 0.8 ** torch.arange(STEPS) / pairs_in_loss(target.labels, counted).sum(1).clamp(min=1)
    total, parts = function(kind, states, weight, target, counted, step_weights)
    return total.detach(), parts, torch.autograd.grad(total * 3, (states, weight))


def assert_equal(a: StepLosses, b: StepLosses, **tolerance: float) -> None:
    torch.testing.assert_close(a.loss_sum, b.loss_sum, **tolerance)
    assert a.counted.equal(b.counted)
    assert a.agreed.equal(b.agreed)
    assert a.asked.equal(b.asked)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("pieces", [1, 4])
def test_loss_and_gradients_equal_the_plain_formula(
    pieces: int, kind: LossKind, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", STEPS * QUERIES * VOCAB // pieces)
    monkeypatch.setattr(loss, "CACHED_LOGITS", 2 * STEPS * VOCAB)
    case = make_case()
    total, parts, gradients = run(draft_loss, *case, kind)
    expected, expected_parts, expected_gradients = run(reference_draft_loss, *case, kind)
    torch.testing.assert_close(total, expected)
    assert_equal(parts, expected_parts)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", LOSSES)
def test_bfloat16_differs_from_float32_by_its_rounding_only(kind: LossKind):
    states, weight, target, counted = make_case(torch.bfloat16)
    total, _, gradients = run(draft_loss, states, weight, target, counted, kind)
    exact = TargetLogits(
        target.last.float(), target.weight.float(), target.bias.float(), 0.7, 5.0, target.labels
    )
    expected, _, references = run(reference_draft_loss, states.float(), weight, exact, counted, kind)
    torch.testing.assert_close(total, expected, rtol=0.02, atol=0)
    for gradient, reference in zip(gradients, references, strict=True):
        assert (gradient.float() - reference).norm() < 0.02 * reference.norm()


def test_labels_outside_the_draft_vocabulary_are_misses_and_not_in_the_loss():
    states, weight, target, counted = make_case()
    _, parts, (gradient, _) = run(draft_loss, states, weight, target, counted)
    assert parts.asked.tolist() == [23, 21, 19]
    assert parts.counted.tolist() == [19, 18, 16]
    assert not gradient[0, 7].any()
    assert not gradient[1, 6].any()
    assert not gradient[2, 5].any()
    assert gradient[1, 5].any()


@pytest.mark.parametrize("function", [draft_loss, reference_draft_loss])
def test_a_batch_whose_labels_are_all_outside_the_draft_vocabulary_has_loss_zero(function):
    states, weight, target, counted = make_case()
    total, parts, gradients = run(
        function, states, weight, replace(target, labels=target.labels * 0 - 1), counted
    )
    assert total == 0
    assert parts.asked.tolist() == [23, 21, 19]
    assert parts.counted.tolist() == [0, 0, 0]
    assert not any(gradient.any() for gradient in gradients)


def test_frozen_output_rows_get_no_gradient_and_the_states_the_same():
    states, weight, target, counted = make_case()
    _, _, (expected, _) = run(draft_loss, states, weight, target, counted)
    step_weights = 0.8 ** torch.arange(STEPS) / pairs_in_loss(target.labels, counted).sum(1)
    total, _ = draft_loss("cross-entropy", states, weight.detach(), target, counted, step_weights)
    assert torch.autograd.grad(3 * total, states)[0].equal(expected)


logits = st.lists(st.lists(st.floats(-30, 30), min_size=6, max_size=6), min_size=2, max_size=2)


@given(logits)
def test_losses_say_how_far_the_distributions_are_apart(pair: list[list[float]]):
    z, target = torch.tensor(pair)
    p, q = target.softmax(-1), z.softmax(-1)
    overlap = float(torch.minimum(p, q).sum())
    values = {kind: float(objective(kind, z[None], z.amax()[None], target[None])[0]) for kind in LOSSES}
    entropy = float(torch.distributions.Categorical(p).entropy())
    assert values["cross-entropy"] == pytest.approx(values["kl"] + entropy, abs=1e-3)
    assert values["kl"] >= 2 * (1 - overlap) ** 2 - 1e-3, "Pinsker's inequality"
    assert values["lk-log"] == pytest.approx(-math.log(max(overlap, LEAST_OVERLAP)), abs=1e-3)
    assert min(values["kl"], 1 - overlap) - 1e-3 <= values["lk"] <= max(values["kl"], 1 - overlap) + 1e-3


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(logits, st.sampled_from(LOSSES))
def test_the_gradient_is_that_of_the_formula(pair: list[list[float]], kind: LossKind):
    z, target = torch.tensor(pair, dtype=torch.float64)
    p, q = target.float().softmax(-1), z.float().softmax(-1)
    assume(bool(((p - q).abs() > 1e-6).all()))  # min(p, q) has a kink where they are equal
    assume(float(torch.minimum(p, q).sum()) > 2 * LEAST_OVERLAP)
    z = z.float().requires_grad_()
    expected = torch.autograd.grad(reference_objective(kind, z, target), z)[0]
    with torch.no_grad():
        _, gradient = objective(kind, z[None], z.amax()[None], target[None])
    torch.testing.assert_close(gradient[0], expected, rtol=1e-3, atol=1e-5)
