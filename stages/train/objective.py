"""What a draft distribution q is taught about the target's distribution p, and the gradient in its logits.

    cross-entropy   -sum_v p_v log q_v                          gradient  q - p
    kl              the same less the entropy of p              gradient  q - p
    lk              w KL + (1 - w) (1 - a),  w = exp(-3 a)      gradient  w (q - p) + (1 - w) g
    lk-log          -log a                                      gradient  g / a

with a = sum_v min(p_v, q_v), the probability that speculative sampling accepts a token drawn from q, g = q
(s - below) the gradient of 1 - a, `below` 1 where q_v < p_v, s = sum of q over those. `lk` and `lk-log` are
the LK losses of arXiv 2602.23881: they aim at a itself, `lk` with the help of KL as long as a is small (its
weight w is a constant to the gradient, taken position by position). cross-entropy and kl train alike; kl is
0 at its best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.train.config import LossKind

LK_DECAY = 3.0
"""How fast the weight of KL in `lk` falls with the overlap: the best of the paper."""

LEAST_OVERLAP = 1e-6
"""Below it, `lk-log` is taken at this overlap: what shares nothing has no gradient to follow."""


def objective(kind: LossKind, z: Tensor, highest: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [..., m] of draft logits z, and their gradients in z [..., m, Vd]; all fp32.

    Args:
        z: [..., m, Vd] fp32.
        highest: [..., m], the largest of each z.
        target_logits: [m, Vd], any float dtype.
    """
    target_logits = target_logits.float()
    p = target_logits.softmax(-1)
    expected = (z * p).sum(-1)
    q = z.softmax(-1)
    # log-sum-exp without one more pass; the largest probability is at least 1/Vd, so its log is exact.
    losses = highest - q.amax(-1).log() - expected
    if kind == "cross-entropy":
        return losses, q.sub_(p)
    if kind == "kl":
        return losses - _entropy(target_logits, p), q.sub_(p)
    below = q < p
    overlap = torch.minimum(q, p).sum(-1)
    towards = (q * below).sum(-1)[..., None] - below.to(q.dtype)
    if kind == "lk-log":
        bounded = overlap.clamp(min=LEAST_OVERLAP)
        return -bounded.log(), q.mul_(towards).div_(bounded[..., None])
    weight = torch.exp(-LK_DECAY * overlap)
    losses = weight * (losses - _entropy(target_logits, p)) + (1 - weight) * (1 - overlap)
    weight = weight[..., None]
    return losses, q.mul_(weight + (1 - weight) * towards).sub_(weight * p)


def reference_objective(kind: LossKind, z: Tensor, target_logits: Tensor) -> Tensor:
    """The losses [..., m] of `objective` as formulas, for autograd."""
    p, log_q = target_logits.float().softmax(-1), z.float().log_softmax(-1)
    cross_entropy = -(p * log_q).sum(-1)
    if kind == "cross-entropy":
        return cross_entropy
    kl = cross_entropy + (p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1)
    if kind == "kl":
        return kl
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    if kind == "lk-log":
        return -overlap.clamp(min=LEAST_OVERLAP).log()
    weight = torch.exp(-LK_DECAY * overlap.detach())
    return weight * kl + (1 - weight) * (1 - overlap)


def _entropy(logits: Tensor, p: Tensor) -> Tensor:
    """[m], of the softmax p of logits [m, Vd]."""
    return logits.logsumexp(-1) - (p * logits).sum(-1)
