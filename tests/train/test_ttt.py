"""Training computes what serving does: every kind of head, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stages.errors import EagleError
from stages.train import attention
from stages.train.attention import group_rows
from stages.train.batch import collate
from stages.train.unroll import unroll
from stages.train.unroll.eagle1 import FEATURE_WEIGHT, NOISE
from tests.train.chains import VARIANTS, Variant, draft_chain, random_head, row_with_every_state
from tests.train.synthetic import make_row

STEPS = 4
MASKS = (
    [0] * 5 + [1] * 9,
    [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1],  # two turns
    [0] * 12 + [1] * 3,
    [1, 1, 1, 1],  # no prompt: position 0 has no feature before it
)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_draft_steps_and_their_gradients_equal_drafting_a_chain_token_by_token(
    variant: Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 200)  # several pieces a group
    head = random_head(variant)
    rows = [row_with_every_state(mask, seed) for seed, mask in enumerate(MASKS)]
    batch = collate(rows, STEPS)
    unrolled = unroll(head, batch, STEPS)
    logits = unrolled.states @ unrolled.weight.T  # [S, Q, Vd]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) * batch.counted[..., None]
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad((logits * weights).sum(), trained)

    query, expected = 0, torch.zeros(())
    for row in sorted(rows, key=lambda row: int(row.supervised[-1]), reverse=True):
        for p in row.supervised.tolist():
            for step, drafted in enumerate(draft_chain(head, row, p - 1, STEPS)):
                if batch.counted[step, query]:
                    torch.testing.assert_close(logits[step, query], drafted, rtol=1e-5, atol=1e-5)
                    expected = expected + (drafted * weights[step, query]).sum()
            query += 1
    assert query == batch.supervised
    for gradient, reference in zip(gradients, torch.autograd.grad(expected, trained), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_row_does_not_see_the_rows_it_is_batched_with(variant: Variant) -> None:
    head = random_head(variant)
    row, long, short = (
        row_with_every_state(mask, seed) for seed, mask in enumerate([MASKS[0], MASKS[1], [0, 0, 1, 1, 1]])
    )
    alone = unroll(head, collate([row], STEPS), STEPS).states
    together = unroll(head, collate([short, row, long], STEPS), STEPS).states
    own = slice(len(long.last), len(long.last) + len(row.last))
    torch.testing.assert_close(together[:, own], alone, rtol=1e-5, atol=1e-5)


def test_rows_share_a_group_only_if_little_of_it_is_padding() -> None:
    groups = group_rows(
        [100, 90, 30, 28], [torch.arange(50), torch.arange(45), torch.arange(9), torch.arange(9)]
    )
    assert [len(group.keys) for group in groups] == [2, 2]
    assert torch.cat([group.queries[group.real] for group in groups]).tolist() == list(range(113))


def test_the_feature_loss_is_how_far_guesses_are_from_the_states_the_target_has_next() -> None:
    head, row = random_head(Variant("eagle1")), row_with_every_state(MASKS[1], 1)
    unrolled = unroll(head, collate([row], 2), 2)
    assert unrolled.feature_loss is not None
    states, every = unrolled.states, row.every_last
    assert every is not None
    expected = torch.zeros(())
    for step in range(2):
        errors = []
        for query, p in enumerate(row.supervised.tolist()):
            if p + step in row.supervised.tolist() and not (step and p == 4):  # 4 ends the first turn
                distance = (states[step, query] - every[p + step]).abs()
                errors.append(torch.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean())
        expected = expected + torch.stack(errors).mean()
    torch.testing.assert_close(unrolled.feature_loss, FEATURE_WEIGHT * expected)


def test_features_are_noisy_in_training_only_and_the_noise_follows_the_seed() -> None:
    head = random_head(Variant("eagle1"))
    batch = collate([row_with_every_state(MASKS[0], 0)], 1)
    assert batch.last_keys is not None
    plain = unroll(head, batch, 1).states
    head.train()

    def noisy(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return unroll(head, batch, 1).states

    assert torch.equal(noisy(3), noisy(3))
    assert not torch.equal(noisy(3), noisy(4))
    assert not torch.allclose(noisy(3), plain)
    torch.manual_seed(3)
    moved = batch.last_keys + (2 * NOISE * torch.rand_like(batch.last_keys) - NOISE)
    expected = unroll(head.eval(), replace(batch, last_keys=moved), 1).states
    head.train()
    torch.testing.assert_close(noisy(3), expected)


@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_features_without_all_last_states_are_refused_with_the_flag_that_makes_them(kind: str) -> None:
    batch = collate([make_row(MASKS[0], 0)], 2)
    with pytest.raises(EagleError, match="--last all"):
        unroll(random_head(Variant(kind)), batch, 2)  # type: ignore[arg-type]
