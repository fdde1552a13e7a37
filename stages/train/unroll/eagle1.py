"""EAGLE-1's unroll: states that the target may have next, and how far they are from those it has (arXiv
2401.15077, section 4.2).

The published recipe is one step: the target's features, with uniform noise, so that the head learns to live
with its own errors. More steps are the same with its own guesses as features, and no noise on those.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.heads import Eagle1Head
from stages.train.batch import TttBatch
from stages.train.unroll.chain import unroll_chain
from stages.train.unroll.unrolled import Unrolled, last_states

NOISE = 0.1
"""Features are moved by a uniform random number of at most this size, while the head trains."""

FEATURE_WEIGHT = 10.0
"""Of the feature loss against the token loss: EAGLE-1 adds them with the weights 1 and 0.1."""


def unroll_eagle1(head: Eagle1Head, batch: TttBatch, steps: int) -> Unrolled:
    """Raises EagleError: the batch lacks the target's last states at its keys."""
    features = last_states(head.kind, batch)
    if head.training:
        # From torch's generator, which training seeds by the step.
        features = features + (torch.rand_like(features) - 0.5) * (2 * NOISE)
    hidden = unroll_chain(head, batch, features, steps)
    loss = torch.stack([_feature_loss(states, batch, step) for step, states in enumerate(hidden)]).sum()
    return Unrolled(head.scored(torch.stack(hidden)), head.lm_head.weight, FEATURE_WEIGHT * loss)


def _feature_loss(states: Tensor, batch: TttBatch, step: int) -> Tensor:
    """Smooth L1 of step i's guesses [Q, h] at the target's states of p+i, p the query's supervised position.

    A mean over the pairs that count, and the numbers of a state.
    """
    query = batch.counted[step].nonzero().squeeze(1)
    if not len(query):
        return states.new_zeros((), dtype=torch.float32)
    return F.smooth_l1_loss(states[query].float(), batch.last[query + step].float())
