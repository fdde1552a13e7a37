"""The loss over the draft vocabulary, without ever holding [tokens, Vd] for a whole batch.

For draft step i of query q, asked for the target's distribution P at position t = q+i:

    P    = softmax over the draft vocabulary of lm_head(last_t), in fp32
    loss = sum_i w_i sum over counted q of objective(z, P),  z the logits of the draft state [Vd]

A pair (i, q) counts if its position is supervised in the same turn (`TttBatch.counted`) and the target's
most likely token is in the draft vocabulary. With w_i = decay^i / (pairs that count at step i of the whole
optimizer step) the loss is the mean of each step, weighted by decay^i, however the rows are shared out over
micro-batches and processes, padded or masked. `draft_loss` works position by position, so that P is computed
once for all steps, and takes the gradients in the same pass as the loss; `reference_draft_loss` is the plain
formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.train.config import LossKind
from stages.train.objective import objective, reference_objective

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


def pairs_in_loss(labels: Tensor, counted: Tensor) -> Tensor:
    """[S, Q] bool: pairs that count, of `TargetLogits.labels` [Q] and `TttBatch.counted` [S, Q]."""
    return torch.stack([row & _in_vocabulary(labels, step) for step, row in enumerate(counted)])


def draft_loss(
    kind: LossKind,
    states: Tensor,
    weight: Tensor,
    target: TargetLogits,
    counted: Tensor,
    step_weights: Tensor,
) -> tuple[Tensor, StepLosses]:
    """The loss of a batch, a scalar that can be differentiated once in `states` and `weight`, and its parts.

    Args:
        states: [S, Q, h] normed draft states; their dtype is that of the matrix products.
        weight: [Vd, h], the head's output rows, trained or frozen.
        counted: [S, Q] bool, see `TttBatch`.
        step_weights: [S] fp32, factor of each pair's loss.
    """
    loss, loss_sum, agreed, pairs = _DraftLoss.apply(kind, states, weight, target, counted, step_weights)
    return loss, StepLosses(loss_sum, pairs, agreed, counted.sum(1))


def reference_draft_loss(
    kind: LossKind,
    states: Tensor,
    weight: Tensor,
    target: TargetLogits,
    counted: Tensor,
    step_weights: Tensor,
) -> tuple[Tensor, StepLosses]:
    """`draft_loss` in plain autograd, [Q, Vd] at once."""
    loss = states.new_zeros((), dtype=torch.float32)
    loss_sum, agreed = [], []
    pairs = pairs_in_loss(target.labels, counted)
    for step, state in enumerate(states):
        query = pairs[step].nonzero().squeeze(1)
        logits = (state[query] @ weight.to(state.dtype).T).float()  # [n, Vd]
        losses = reference_objective(kind, logits, target.logits(query + step))
        loss = loss + step_weights[step] * losses.sum()
        loss_sum.append(losses.sum().detach())
        agreed.append((logits.argmax(-1) == target.labels[query + step]).sum())
    return loss, StepLosses(torch.stack(loss_sum), pairs.sum(1), torch.stack(agreed), counted.sum(1))


def _in_vocabulary(labels: Tensor, step: int) -> Tensor:
    """[Q] bool: whether position q+step exists and has a label in the draft vocabulary."""
    inside = torch.zeros_like(labels, dtype=torch.bool)
    inside[: max(len(labels) - step, 0)] = labels[step:] >= 0
    return inside


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: LossKind,
        states: Tensor,
        weight: Tensor,
        target: TargetLogits,
        counted: Tensor,
        step_weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        steps, queries, _ = states.shape
        shifts = torch.arange(steps, device=states.device)[:, None]  # [S, 1]
        pairs = pairs_in_loss(target.labels, counted)

        rows = weight.to(states.dtype)
        loss_sum = torch.zeros(steps, device=states.device)
        agreed = torch.zeros(steps, dtype=torch.int64, device=states.device)
        grad_states = torch.zeros_like(states)
        trained = ctx.needs_input_grad[2]  # frozen output rows need no gradient
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if trained else None
        positions = (target.labels >= 0).nonzero().squeeze(1)
        at_once = max(1, LOGITS_AT_ONCE // (steps * len(weight)))
        for start in range(0, len(positions), at_once):
            at = positions[start : start + at_once]  # [c]
            query = at - shifts  # [S, c]
            asks = (query >= 0) & pairs[shifts, query.clamp(min=0)]
            query = query.clamp(min=0)
            drafted = states[shifts, query]  # [S, c, h]
            logits = (drafted.flatten(0, 1) @ rows.T).view(steps, len(at), -1)
            losses, agrees = _loss_and_gradient(kind, logits, target.logits(at), target.labels[at])
            loss_sum += (losses * asks).sum(1)
            agreed += (agrees & asks).sum(1)

            gradient = logits.flatten(0, 1)
            share = (asks * step_weights[:, None])[..., None]  # [S, c, 1] fp32
            if grad_weight is not None:
                grad_weight += gradient.T @ (drafted * share).to(states.dtype).flatten(0, 1)
            grad_drafted = (gradient @ rows).view_as(drafted) * share
            grad_states.view(-1, states.shape[-1]).index_add_(
                0, (query + shifts * queries).flatten(), grad_drafted.to(states.dtype).flatten(0, 1)
            )
        ctx.save_for_backward(grad_states, None if grad_weight is None else grad_weight.to(weight.dtype))
        number = pairs.sum(1)
        ctx.mark_non_differentiable(loss_sum, agreed, number)
        return (step_weights * loss_sum).sum(), loss_sum, agreed, number

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        return (
            None,
            grad_states * grad_loss,
            None if grad_weight is None else grad_weight * grad_loss,
            None,
            None,
            None,
        )


def _loss_and_gradient(
    kind: LossKind, logits: Tensor, target_logits: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses and whether the label wins, [S, c] each; puts the gradient in place of the logits.

    logits [S, c, Vd], target_logits [c, Vd], labels [c]. Goes over pieces that stay in the processor's cache.
    """
    steps, count, size = logits.shape
    at_once = count if logits.is_cuda else max(1, CACHED_LOGITS // (steps * size))
    losses, agrees = [], []
    for start in range(0, count, at_once):
        piece = slice(start, start + at_once)
        z = logits[:, piece].float()  # [S, m, Vd]
        label = z.gather(-1, labels[piece].expand(steps, -1)[..., None])[..., 0]
        highest = z.amax(-1)
        agrees.append(label == highest)
        loss, gradient = objective(kind, z, highest, target_logits[piece])
        losses.append(loss)
        logits[:, piece] = gradient
    return torch.cat(losses, dim=1), torch.cat(agrees, dim=1)
