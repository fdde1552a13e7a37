"""Soft cross-entropy over the draft vocabulary, without ever holding [tokens, Vd] for a whole batch.

For draft step i of query q, asked for the target's distribution P at position t = q+i:

    P      = softmax over the draft vocabulary of lm_head(last_t), in fp32
    loss_i = mean over counted q of  logsumexp(z) - sum_v P_v z_v,  z the logits of the draft state [Vd]
    loss   = sum_i decay^i loss_i,  d loss / d z = decay^i / count_i * (softmax(z) - P)

A pair (i, q) counts if its position is supervised in the same turn (`TttBatch.counted`) and the target's most
likely token is in the draft vocabulary. `soft_cross_entropy` works position by position, so that P is
computed once for all steps, and takes the gradients in the same pass as the loss;
`reference_soft_cross_entropy` is the plain formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE = 1 << 23
"""Most draft logits in memory at a time (with one position as the least piece)."""

CACHED_LOGITS = 1 << 20
"""Most draft logits in fp32 at a time on a CPU: passes that leave its cache are several times slower."""


@dataclass(frozen=True)
class TargetLogits:
    """What gives the target's distribution over the draft vocabulary at each of Q positions."""

    last: Tensor  # [Q, h], state after the target's final norm
    weight: Tensor  # [Vd, h], the draft vocabulary's rows of the target's lm_head
    bias: Tensor | None  # [Vd]
    scale: float  # factor of the logits; 1 for most targets
    softcap: float | None  # bound of the logits' size, by tanh; none for most targets
    labels: Tensor  # [Q] int64, draft id of the target's most likely token; -1 outside the draft vocabulary

    def logits(self, positions: Tensor) -> Tensor:
        """[c, Vd] of positions [c]; their softmax is renormalised over the draft vocabulary by itself."""
        logits = self.last[positions] @ self.weight.T
        if self.bias is not None:
            logits = logits + self.bias
        if self.scale != 1:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True)
class StepLosses:
    """Loss and top-1 agreement of each draft step, as sums and counts, so that batches add up.

    A position whose most likely token is outside the draft vocabulary is in `asked`, as a miss, and not in
    `counted`.
    """

    loss_sum: Tensor  # [S] fp32
    counted: Tensor  # [S] int64, pairs in the loss
    agreed: Tensor  # [S] int64, pairs whose most likely tokens are the same
    asked: Tensor  # [S] int64, pairs at supervised positions


def soft_cross_entropy(
    states: Tensor, weight: Tensor, target: TargetLogits, counted: Tensor, decay: float
) -> tuple[Tensor, StepLosses]:
    """The loss of a batch, a scalar that can be differentiated once in `states` and `weight`, and its parts.

    Args:
        states: [S, Q, h] normed draft states; their dtype is that of the matrix products.
        weight: [Vd, h], the head's lm_head.
        counted: [S, Q] bool, see `TttBatch`.
        decay: weight of a step's loss against that of the step before.
    """
    loss, loss_sum, agreed, pairs = _SoftCrossEntropy.apply(states, weight, target, counted, decay)
    return loss, StepLosses(loss_sum, pairs, agreed, counted.sum(1))


def reference_soft_cross_entropy(
    states: Tensor, weight: Tensor, target: TargetLogits, counted: Tensor, decay: float
) -> tuple[Tensor, StepLosses]:
    """`soft_cross_entropy` in plain autograd, [S, Q, Vd] at once."""
    loss = states.new_zeros((), dtype=torch.float32)
    loss_sum, pairs, agreed = [], [], []
    for step, state in enumerate(states):
        query = (counted[step] & _in_vocabulary(target.labels, step)).nonzero().squeeze(1)
        logits = (state[query] @ weight.to(state.dtype).T).float()  # [n, Vd]
        probabilities = target.logits(query + step).softmax(-1, dtype=torch.float32)
        losses = -(probabilities * logits.log_softmax(-1)).sum(-1)
        loss = loss + decay**step * losses.sum() / max(len(query), 1)
        loss_sum.append(losses.sum().detach())
        pairs.append(len(query))
        agreed.append((logits.argmax(-1) == target.labels[query + step]).sum())
    return loss, StepLosses(
        torch.stack(loss_sum), torch.tensor(pairs, device=states.device), torch.stack(agreed), counted.sum(1)
    )


def _in_vocabulary(labels: Tensor, step: int) -> Tensor:
    """[Q] bool: whether position q+step exists and has a label in the draft vocabulary."""
    inside = torch.zeros_like(labels, dtype=torch.bool)
    inside[: max(len(labels) - step, 0)] = labels[step:] >= 0
    return inside


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, target: TargetLogits, counted: Tensor, decay: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        steps, queries, _ = states.shape
        shifts = torch.arange(steps, device=states.device)[:, None]  # [S, 1]
        pairs = torch.stack([counted[i] & _in_vocabulary(target.labels, i) for i in range(steps)])  # [S, Q]
        number = pairs.sum(1)  # [S]
        scale = decay ** shifts[:, 0].float() / number.clamp(min=1)  # [S]

        rows = weight.to(states.dtype)
        loss_sum = torch.zeros(steps, device=states.device)
        agreed = torch.zeros(steps, dtype=torch.int64, device=states.device)
        grad_states = torch.zeros_like(states)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        positions = (target.labels >= 0).nonzero().squeeze(1)
        at_once = max(1, LOGITS_AT_ONCE // (steps * len(weight)))
        for start in range(0, len(positions), at_once):
            at = positions[start : start + at_once]  # [c]
            query = at - shifts  # [S, c]
            asks = (query >= 0) & pairs[shifts, query.clamp(min=0)]
            query = query.clamp(min=0)
            drafted = states[shifts, query]  # [S, c, h]
            logits = (drafted.flatten(0, 1) @ rows.T).view(steps, len(at), -1)
            losses, agrees = _loss_and_gradient(logits, target.logits(at), target.labels[at])
            loss_sum += (losses * asks).sum(1)
            agreed += (agrees & asks).sum(1)

            gradient = logits.flatten(0, 1)
            share = (asks * scale[:, None])[..., None]  # [S, c, 1] fp32
            grad_weight += gradient.T @ (drafted * share).to(states.dtype).flatten(0, 1)
            grad_drafted = (gradient @ rows).view_as(drafted) * share
            grad_states.view(-1, states.shape[-1]).index_add_(
                0, (query + shifts * queries).flatten(), grad_drafted.to(states.dtype).flatten(0, 1)
            )
        ctx.save_for_backward(grad_states, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(loss_sum, agreed, number)
        return (scale * loss_sum).sum(), loss_sum, agreed, number

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states * grad_loss, grad_weight * grad_loss, None, None, None


def _loss_and_gradient(logits: Tensor, target_logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy and whether the label wins, [S, c] each; puts softmax(z) - P in place of logits z.

    logits [S, c, Vd], target_logits [c, Vd], labels [c]. Goes over pieces that stay in the processor's cache.
    """
    steps, count, size = logits.shape
    at_once = count if logits.is_cuda else max(1, CACHED_LOGITS // (steps * size))
    losses, agrees = [], []
    for start in range(0, count, at_once):
        piece = slice(start, start + at_once)
        z = logits[:, piece].float()  # [S, m, Vd]
        p = target_logits[piece].softmax(-1, dtype=torch.float32)  # [m, Vd]
        highest = z.amax(-1)
        label = z.gather(-1, labels[piece].expand(steps, -1)[..., None])[..., 0]
        agrees.append(label == highest)
        expected = (z * p).sum(-1)
        softmax = z.softmax(-1)
        # log-sum-exp without one more pass; the largest probability is at least 1/Vd, so its log is exact.
        losses.append(highest - softmax.amax(-1).log() - expected)
        logits[:, piece] = softmax.sub_(p)
    return torch.cat(losses, dim=1), torch.cat(agrees, dim=1)
