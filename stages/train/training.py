"""One head in training: the step of the optimizer, and the measurement on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from stages.errors import EagleError
from stages.features.layout import FeatureRow
from stages.features.source import FeatureSource
from stages.heads import Eagle3Config, Eagle3Head, init_from_target
from stages.targets import choose_device, logit_scale, logit_softcap
from stages.train.batch import TttBatch, collate
from stages.train.config import TrainConfig
from stages.train.loss import StepLosses, TargetLogits, soft_cross_entropy
from stages.train.metrics import Agreement, measure_agreement
from stages.train.optimizer import CLIP, learning_rate, make_optimizer
from stages.train.ttt import ttt_hidden
from stages.train.vocabulary import DraftVocabulary, draft_labels


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

    def batch(self, rows: Sequence[FeatureRow]) -> TttBatch:
        """A batch of these rows for `step` and `evaluate`, on the device; holds no view of the rows."""
        return collate(rows, self.recipe.ttt_steps).to(self._device, self._dtype)

    def step(self, batch: TttBatch, number: int) -> StepLosses:
        """Takes optimizer step `number` (0-based) on a batch, and returns the losses before it.

        Raises:
            EagleError: loss or gradient is not finite; the weights are then as they were.
        """
        recipe = self.recipe
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

    def evaluate(self, batches: Iterable[TttBatch]) -> Agreement:
        """Agreement with the target on rows that are not trained on."""
        agreement = Agreement.none(self.recipe.ttt_steps)
        for batch in batches:
            with self._autocast():
                agreement += measure_agreement(self.head, batch, self.recipe.ttt_steps)
        return agreement

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device.type, self._dtype, enabled=self._dtype is not torch.float32)


def make_training(
    config: TrainConfig, features: FeatureSource, vocabulary: DraftVocabulary, total_steps: int
) -> Training:
    """A fresh head of the target's shape, its weights a function of the seed, ready for the first step."""
    device, dtype = choose_device(config.device), getattr(torch, config.number_format)
    target_config, weights = features.target_config, features.target_weights()
    torch.manual_seed(config.seed)
    head_config = Eagle3Config.from_target(target_config, len(vocabulary.ids), features.feature_layers)
    head = Eagle3Head(head_config.model_copy(update={"torch_dtype": config.number_format}))
    head.set_vocabulary(vocabulary.ids)
    init_from_target(head, weights, output=config.init == "target")
    head.to(device).embed_tokens.to(dtype)  # frozen, so it needs no fp32 copy
    bias = weights.get("lm_head.bias")
    output = TargetOutput(
        weight=weights["lm_head.weight"][vocabulary.ids].to(device, dtype),
        bias=None if bias is None else bias[vocabulary.ids].to(device, dtype),
        scale=logit_scale(SimpleNamespace(**target_config)),
        softcap=logit_softcap(SimpleNamespace(**target_config)),
    )
    recipe = Recipe(total_steps, config.lr, config.warmup, config.ttt_steps, config.ttt_decay)
    return Training(head, output, recipe, dtype)


def target_parameters(target_config: dict[str, Any]) -> int:
    """Counted on a model without storage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = type(AutoConfig.for_model(target_config["model_type"])).from_dict(target_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
