"""One head in training: the step of the optimizer, and the measurement on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.errors import EagleError
from stages.features.layout import FeatureRow
from stages.heads import Eagle3Head
from stages.train.batch import TttBatch, collate
from stages.train.loss import StepLosses, TargetLogits, soft_cross_entropy
from stages.train.metrics import Agreement, measure_agreement
from stages.train.optimizer import CLIP, learning_rate, make_optimizer
from stages.train.ttt import ttt_hidden
from stages.train.vocabulary import draft_labels


@dataclass(frozen=True)
class TargetOutput:
    """The draft vocabulary's rows of the target's lm_head, in the dtype of the matrix products."""

    weight: Tensor  # [Vd, h]
    bias: Tensor | None  # [Vd]
    scale: float = 1.0
    softcap: float | None = None

    def of(self, batch: TttBatch, draft_ids: Tensor) -> TargetLogits:
        labels = draft_labels(batch.target_argmax, draft_ids)
        return TargetLogits(batch.last, self.weight, self.bias, self.scale, self.softcap, labels)


@dataclass(frozen=True)
class Recipe:
    """How the weights are changed."""

    total_steps: int
    lr: float
    warmup: float
    ttt_steps: int
    ttt_decay: float


class Training:
    """A head with fp32 weights, its optimizer, and what it learns from.

    Matrix products run in `dtype`: bfloat16 by autocast, or float32.
    """

    def __init__(self, head: Eagle3Head, output: TargetOutput, recipe: Recipe, dtype: torch.dtype) -> None:
        self.head = head
        self.optimizer = make_optimizer(head, recipe.lr)
        self._output = output
        self.recipe = recipe
        self._dtype = dtype
        self._device = head.fc.weight.device
        self._trained = [parameter for parameter in head.parameters() if parameter.requires_grad]

    def step(self, rows: Sequence[FeatureRow], number: int) -> StepLosses:
        """Takes optimizer step `number` (0-based) on the rows, and returns the losses before it.

        Raises:
            EagleError: loss or gradient is not finite; the weights are then as they were.
        """
        recipe = self.recipe
        batch = self._batch(rows)
        target = self._output.of(batch, self.head.draft_ids)
        with self._autocast():
            hidden = ttt_hidden(self.head, batch, recipe.ttt_steps)
            states = self.head.norm(torch.stack(hidden))
            loss, losses = soft_cross_entropy(
                states, self.head.lm_head.weight, target, batch.counted, recipe.ttt_decay
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._trained, CLIP).item()
        if not math.isfinite(loss.item()) or not math.isfinite(norm):
            raise EagleError(
                f"at step {number + 1} the loss is {loss.item():.4g} and the gradient's norm {norm:.4g}: "
                f"use a lower --lr than {recipe.lr:g}, or --dtype float32; if it stays so, "
                "extract the features again"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, recipe.total_steps, recipe.lr, recipe.warmup)
        self.optimizer.step()
        return losses

    def evaluate(self, batches: Iterable[Sequence[FeatureRow]]) -> Agreement:
        """Agreement with the target on rows that are not trained on."""
        agreement = Agreement.none(self.recipe.ttt_steps)
        for rows in batches:
            with self._autocast():
                agreement += measure_agreement(self.head, self._batch(rows), self.recipe.ttt_steps)
        return agreement

    def _batch(self, rows: Sequence[FeatureRow]) -> TttBatch:
        return collate(rows, self.recipe.ttt_steps).to(self._device, self._dtype)

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not torch.float32)
