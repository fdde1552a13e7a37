"""The loss of a micro-batch as one call of a module that has the head in it, for FSDP to wrap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stages.heads import DraftHead
from stages.train.batch import TttBatch
from stages.train.config import LossKind
from stages.train.loss import StepLosses, TargetLogits, draft_loss
from stages.train.unroll import unroll


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed at a time, and what the target says of them."""

    batch: TttBatch
    target: TargetLogits


class HeadLoss(nn.Module):
    """What a head loses on a micro-batch."""

    def __init__(self, head: DraftHead, kind: LossKind, steps: int, dtype: torch.dtype) -> None:
        """`dtype`: of matrix products; bfloat16 by autocast, or float32."""
        super().__init__()
        self.head = head
        self._kind = kind
        self._steps = steps
        self._dtype = dtype

    def forward(
        self, micro: MicroBatch | None, step_weights: Tensor, queries: Tensor
    ) -> tuple[Tensor, StepLosses]:
        """The share of these rows in the loss of an optimizer step.

        Args:
            micro: None for no rows: then the loss is 0, and so are all gradients.
            step_weights: [S] fp32, factor of each pair's loss.
            queries: scalar, of the optimizer step.
        """
        if micro is None:
            return self._nothing(step_weights)
        batch, device = micro.batch, step_weights.device
        with torch.autocast(device.type, self._dtype, enabled=self._dtype is not torch.float32):
            unrolled = unroll(self.head, batch, self._steps)
            loss, losses = draft_loss(
                self._kind, unrolled.states, unrolled.weight, micro.target, batch.counted, step_weights
            )
        if unrolled.feature_loss is not None:
            loss = loss + unrolled.feature_loss * (batch.supervised / queries)
        return loss, losses

    def _nothing(self, step_weights: Tensor) -> tuple[Tensor, StepLosses]:
        parts = [parameter.sum() for parameter in self.head.parameters() if parameter.requires_grad]
        none = torch.zeros_like(step_weights, dtype=torch.int64)
        return torch.stack(parts).float().sum() * 0, StepLosses(
            torch.zeros_like(step_weights), none, none, none
        )
