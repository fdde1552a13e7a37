"""What the ranking of children learns: how far the noise counts, and how far chances can be believed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from stages.decoding.drafters.calibration import Calibration
from stages.decoding.drafters.strength import NoiseStrength, Pool, with_noise
from stages.decoding.growth import Outcome


def pools(sharper: float, count: int, seed: int = 0) -> list[tuple[Pool, int]]:
    """Draws of a target that is sharper than its drafter, which hedges what it does not know."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        q = (2 * torch.randn(40, generator=generator)).log_softmax(-1)
        noise = -(-torch.rand(40, generator=generator).log()).log()
        p = sharper * q + (sharper - 1) * torch.randn(40, generator=generator)
        made.append((Pool(torch.arange(40) + 100, q, noise, depth=1), 100 + int((p + noise).argmax())))
    return made


def hits(made: Sequence[tuple[Pool, int]], strength: float) -> int:
    found = 0
    for pool, drawn in made:
        best = int(with_noise(pool.log_probs[None], pool.noise[None], torch.tensor([[strength]])).argmax())
        found += int(pool.ids[best]) == drawn
    return found


def test_the_strength_of_the_noise_falls_with_what_the_drafter_knows_and_raises_acceptance() -> None:
    found = []
    for sharper in (1.0, 2.0, 4.0):
        strength = NoiseStrength()
        for pool, drawn in pools(sharper, 300):
            strength.observe(1.0, pool, drawn)
        found.append(strength.at(1.0, 1))
        held_out = pools(sharper, 400, seed=1)
        assert hits(held_out, found[-1]) >= hits(held_out, 0.0)
    assert found[0] == 1.0
    assert found[0] > found[1] > found[2]


def test_chances_with_noise_sum_to_one_over_the_pool_and_the_rest() -> None:
    q = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    noise = torch.rand(2, 50)
    whole = with_noise(q, noise, torch.tensor([[0.5], [0.0]]))
    torch.testing.assert_close(
        whole, (q + torch.tensor([[0.5], [0.0]]) * noise).log_softmax(-1), atol=1e-4, rtol=0
    )
    part = with_noise(q[:, :10], noise[:, :10], torch.zeros(2, 1))
    torch.testing.assert_close(part, q[:, :10], atol=1e-5, rtol=0)


def test_calibration_learns_how_often_children_are_accepted() -> None:
    def worth(stated: float) -> float:
        return stated**2 / (stated**2 + 2 * (1 - stated) ** 2)

    calibration, source = Calibration(), random.Random(0)
    for _ in range(3000):
        stated = source.uniform(0.05, 0.95)
        hit = source.random() < worth(stated)
        second = Outcome(1, 0.25, 1.0, 1, source.random() < worth(0.25))
        calibration.observe([Outcome(1, stated, 1.0, 0, hit), second])
    for stated in (0.3, 0.6, 0.9):
        assert calibration.probability(1, stated) == pytest.approx(worth(stated), abs=0.06)
    assert calibration.probability(2, 0.6) == pytest.approx(0.6, abs=0.01)  # never observed
    first, second = calibration.expected(1, 1.0)[:2]
    assert first == pytest.approx(0.45, abs=0.1)
    assert second == pytest.approx(worth(0.25), abs=0.05)
