"""How strongly the target's noise counts when a drafter ranks children, fitted to what the target drew.

At a temperature the target draws y = argmax(log p + G), and the noise G of a position is known before the
target has run. A drafter whose q is close to p does better to rank by log q + s * G than by log q; s = 1
would be right if q were p, and the further q is off, the less G says. With

    r_s = log q + s * G

the strength in use is the s of a grid under which the draws seen so far were most likely, as sum of
log-softmax(a * r_s)[y] at the best a, old draws fading; one for each kind of temperature and each level of
the tree. The factor a is there since knowing the noise makes a ranking surer than r_s says. On the small
trained head the s so found, 0.5, is also the one with the most accepted drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import ops_loaded
from stages.decoding.drafters.calibration import temperature_kind

GRID = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0)
FACTORS = (1.0, 1.5, 2.5)
POOL = 128
"""The most probable tokens of a node, which alone are given noise."""

_START = 0.5
FADING = 0.998
_LEVELS = 4
# The starting value counts like a few draws, so that the first ones do not throw it about.
PRIOR = [-2.0 * abs(s - _START) for s in GRID]


@dataclass
class Pool:
    """The tokens of one node that may be ranked with noise.

    ids: int64 [P], target ids; log_probs: fp32 [P], of the drafter at the request's temperature; noise: fp32
    [P], of the position at which a child would stand.
    """

    ids: Tensor
    log_probs: Tensor
    noise: Tensor
    depth: int


class NoiseStrength:
    """The fitted strengths of one drafter."""

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[Tensor, list[memoryview[float]]]] = {}

    def numbers(self, temperature: float) -> Tensor:
        """What is known at a temperature, float64 [levels, 1 + S * A], in the memory that the CPU op of a
        whole drafting cycle corrects too: the strength in use, then the log-likelihoods of the draws, by
        strength and factor."""
        return self._kind(temperature)[0]

    def at(self, temperature: float, depth: int) -> float:
        """The strength for children ``depth`` levels below the root."""
        return self._level(temperature, depth)[0]

    def by_depth(self, temperature: float) -> list[float]:
        """Of each depth from 1 on; below, all are as the last."""
        if temperature == 0:
            return [0.0] * _LEVELS
        return [level[0] for level in self._kind(temperature)[1]]

    def observe(self, temperature: float, pool: Pool, drawn: int) -> None:
        """The target drew token ``drawn`` where the pool's node stands. Nothing is learned of a draw from
        outside the pool."""
        try:
            place = pool.ids.tolist().index(drawn)
        except ValueError:
            return
        level = self._level(temperature, pool.depth)
        # A few numbers in plain Python: as tensors they would take several times as long.
        best, factors = -math.inf, len(FACTORS)
        for i, found in enumerate(_likelihoods(pool, place).tolist()):
            at = 1 + i * factors
            for j, now in enumerate(found):
                level[at + j] = FADING * level[at + j] + now
            if (worth := max(level[at : at + factors]) + PRIOR[i]) > best:
                best, level[0] = worth, GRID[i]

    def _level(self, temperature: float, depth: int) -> memoryview[float]:
        return self._kind(temperature)[1][min(depth, _LEVELS) - 1]

    def _kind(self, temperature: float) -> tuple[Tensor, list[memoryview[float]]]:
        kind = temperature_kind(temperature)
        if kind not in self._kinds:
            numbers = torch.zeros(_LEVELS, 1 + len(GRID) * len(FACTORS), dtype=torch.float64)
            numbers[:, 0] = _START
            data: Any = numbers.numpy()
            self._kinds[kind] = numbers, [memoryview(level) for level in data]
        return self._kinds[kind]


def _likelihoods(pool: Pool, place: int) -> Tensor:
    """log-softmax(a * r_s) of the token at a place of the pool: [S, A]."""
    if pool.noise.device.type == "cpu" and ops_loaded():
        return torch.ops.eagle_cpu.likelihoods(pool.log_probs, pool.noise, place, GRID, FACTORS)
    ranked = torch.tensor(GRID)[:, None, None] * pool.noise.cpu() + pool.log_probs.cpu()  # [S, 1, P]
    return (torch.tensor(FACTORS)[:, None] * ranked).log_softmax(-1)[..., place]


def with_noise(pool_log_probs: Tensor, noise: Tensor, strength: Tensor) -> Tensor:
    """log-softmax(log q + s * G) over the whole vocabulary, of the pool's tokens.

    The tokens outside are given the noise's mean effect, E[exp(s G)] = Gamma(1 - s).

    Args:
        pool_log_probs: fp32 [R, P], noise likewise.
        strength: fp32 [R, 1].
    """
    noisy = pool_log_probs + strength * noise
    outside = (1 - pool_log_probs.exp().sum(-1, keepdim=True)).clamp(min=1e-9).log()
    outside = outside + torch.lgamma(1 - strength.clamp(max=0.9))
    return noisy - torch.logaddexp(noisy.logsumexp(-1, keepdim=True), outside)
