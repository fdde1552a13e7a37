"""One head in training: the step of the optimizer, and the measurement on held-out rows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from stages.errors import EagleError
from stages.features.layout import FeatureRow
from stages.features.source import FeatureSource
from stages.heads import DraftHead, head_of
from stages.targets import choose_device, logit_scale, logit_softcap
from stages.train.acceptance import Acceptance, measure
from stages.train.batch import TttBatch, collate
from stages.train.config import LossKind, OptimizerKind, Schedule, TrainConfig
from stages.train.head_loss import HeadLoss, MicroBatch
from stages.train.loss import StepLosses, TargetLogits, pairs_in_loss
from stages.train.optimizer import CLIP, learning_rate, make_optimizer
from stages.train.ranks import Ranks
from stages.train.recompute import recompute_layers
from stages.train.sharding import gathered, shard, whole
from stages.train.vocabulary import draft_labels

NORMALISER_ROWS = 8192
NORMALISER_TOKENS = 512
"""Rows of the target's lm_head, and positions, whose logits are in memory at a time."""


@dataclass(frozen=True)
class TargetOutput:
    """The target's lm_head: the draft vocabulary's rows in the dtype of matrix products, and all rows."""

    weight: Tensor  # [Vd, h]
    bias: Tensor | None  # [Vd]
    whole_weight: Tensor  # [V, h], on the CPU
    whole_bias: Tensor | None  # [V]
    scale: float = 1.0
    softcap: float | None = None

    def of(self, batch: TttBatch, draft_ids: Tensor) -> TargetLogits:
        labels = draft_labels(batch.target_argmax, draft_ids)
        return TargetLogits(batch.last, self.weight, self.bias, self.scale, self.softcap, labels)

    def log_norm(self, last: Tensor) -> Tensor:
        """[Q] fp32: log of the sum of exponentials of all the target's logits, of its last states [Q, h]."""
        total = last.new_full((len(last),), -torch.inf, dtype=torch.float32)
        everything = torch.arange(len(last), device=last.device)
        for start in range(0, len(self.whole_weight), NORMALISER_ROWS):
            rows = slice(start, start + NORMALISER_ROWS)
            weight = self.whole_weight[rows].to(last.device, last.dtype)
            bias = None if self.whole_bias is None else self.whole_bias[rows].to(last.device, last.dtype)
            block = TargetLogits(last, weight, bias, self.scale, self.softcap, everything)
            sums = [block.logits(at).float().logsumexp(-1) for at in everything.split(NORMALISER_TOKENS)]
            total = torch.logaddexp(total, torch.cat(sums))
        return total


@dataclass(frozen=True)
class Recipe:
    """How the weights are changed."""

    total_steps: int
    lr: float
    warmup: float
    ttt_steps: int
    ttt_decay: float
    loss: LossKind = "cross-entropy"
    optimizer: OptimizerKind = "adamw"
    schedule: Schedule = "cosine"
    weight_decay: float = 0.0
    recompute: bool = False
    seed: int = 0


class Training:
    """A head with fp32 weights, its optimizer, and what it learns from.

    Matrix products run in `dtype`: bfloat16 by autocast, or float32. With `sharded`, each process has its
    part of weights, gradients and optimizer state only (`stages.train.sharding`).
    """

    def __init__(
        self,
        head: DraftHead,
        output: TargetOutput,
        recipe: Recipe,
        dtype: torch.dtype,
        ranks: Ranks | None = None,
        sharded: bool = False,
    ) -> None:
        self.head = head
        self.ranks = ranks or Ranks()
        self.sharded = sharded
        self._loss = HeadLoss(head, recipe.loss, recipe.ttt_steps, dtype)
        if sharded:
            shard(self._loss, self.ranks, output.weight.device, dtype)
        self.optimizer = make_optimizer(head, recipe.optimizer, recipe.lr, recipe.weight_decay)
        self._output = output
        self.recipe = recipe
        self._dtype = dtype
        self.device = output.weight.device
        self._trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        self._log_norms: list[Tensor] = []
        if recipe.recompute:
            recompute_layers(head)

    def batch(self, rows: Sequence[FeatureRow]) -> TttBatch:
        """A batch of these rows for `step`, on the device; holds no view of the rows."""
        return collate(rows, self.recipe.ttt_steps).to(self.device, self._dtype)

    def step(self, batches: Sequence[TttBatch], number: int) -> StepLosses:
        """Takes optimizer step `number` (0-based) on this process's micro-batches; returns losses before it.

        The step and the losses are those of the micro-batches of all processes.

        Raises:
            EagleError: loss or gradient is not finite; the weights are then as they were.
        """
        recipe, steps = self.recipe, self.recipe.ttt_steps
        micros = [MicroBatch(batch, self._output.of(batch, self.head.draft_ids)) for batch in batches]
        counts = torch.zeros(steps + 1, dtype=torch.int64, device=self.device)  # pairs of each step; queries
        for micro in micros:
            counts[:steps] += pairs_in_loss(micro.target.labels, micro.batch.counted).sum(1)
            counts[steps] += micro.batch.supervised
        self.ranks.add([counts])
        decays = recipe.ttt_decay ** torch.arange(steps, device=self.device).float()
        step_weights = decays / counts[:steps].clamp(min=1)

        self.head.train()
        self.optimizer.zero_grad()
        sums = torch.zeros(4, steps, dtype=torch.float64, device=self.device)
        for index, each in enumerate(self._with_turns_of_others(micros)):
            self._seed(number, index)
            loss, losses = self._loss(each, step_weights, counts[steps])
            loss.backward()
            parts = (losses.loss_sum, losses.agreed, losses.asked, loss.detach().expand(steps))
            sums += torch.stack([part.double() for part in parts])
        if not self.sharded:
            self.ranks.add([p.grad for p in self._trained if p.grad is not None])
        self.ranks.add([sums])
        loss_sum, agreed, asked, total = sums
        self._take(number, total[0].item())
        return StepLosses(loss_sum.float(), counts[:steps], agreed.long(), asked.long())

    def evaluate(self, batches: Iterable[Sequence[FeatureRow]], steps: int) -> Acceptance:
        """What the head is worth on rows that are not trained on: this process's, and those of all others.

        Args:
            batches: the same ones in the same order each time.
        """
        found = Acceptance.none(steps)
        self.head.eval()
        with gathered(self._loss):
            for number, rows in enumerate(batches):
                batch = collate(rows, steps).to(self.device, self._dtype)
                if number == len(self._log_norms):
                    self._log_norms.append(self._output.log_norm(batch.last))
                target = self._output.of(batch, self.head.draft_ids)
                with torch.autocast(self.device.type, self._dtype, enabled=self._dtype is not torch.float32):
                    found += measure(self.head, batch, steps, target, self._log_norms[number])
        return found.summed(self.ranks.add, self.device)

    def whole_head(self) -> DraftHead:
        """The head with all of its weights, those of parts in the format they are saved in.

        All processes call it together; only the first one's is complete.
        """
        if not self.sharded:
            return self.head
        with torch.device("meta"):
            made = head_of(self.head.config)
        made = made.to(getattr(torch, self.head.config.torch_dtype)).to_empty(device=self.device)
        given = {**dict(self.head.named_parameters()), **dict(self.head.named_buffers())}
        with torch.no_grad():
            for name, tensor in chain(made.named_parameters(), made.named_buffers()):
                tensor.copy_(whole(given[name]))
        return made

    def _with_turns_of_others(self, micros: Sequence[MicroBatch]) -> Sequence[MicroBatch | None]:
        """Where the head is shared out, all processes compute equally often; elsewhere at least once."""
        turns = self.ranks.most(len(micros), self.device) if self.sharded else 1
        return [*micros, *[None] * (turns - len(micros))]

    def _take(self, number: int, loss: float) -> None:
        """Changes the weights by the gradients that are there."""
        recipe = self.recipe
        norm = whole(torch.nn.utils.clip_grad_norm_(self._trained, CLIP)).item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise EagleError(
                f"at step {number + 1} the loss is {loss:.4g} and the gradient's norm {norm:.4g}: "
                f"use a lower --lr than {recipe.lr:g}, or --dtype float32; if it stays so, "
                "extract the features again"
            )
        self.optimizer.step(
            learning_rate(number, recipe.total_steps, recipe.lr, recipe.warmup, recipe.schedule)
        )

    def _seed(self, number: int, index: int) -> None:
        """Random numbers follow from seed and step, so that a run that continues draws the same."""
        torch.manual_seed(
            random.Random(f"{self.recipe.seed} {number} {self.ranks.rank} {index}").getrandbits(62)
        )


def make_recipe(config: TrainConfig, total_steps: int) -> Recipe:
    return Recipe(
        total_steps=total_steps,
        lr=config.lr,
        warmup=config.warmup,
        ttt_steps=config.ttt_steps,
        ttt_decay=config.ttt_decay,
        loss=config.loss,
        optimizer=config.chosen_optimizer,
        schedule=config.schedule,
        weight_decay=config.weight_decay,
        recompute=config.recompute,
        seed=config.seed,
    )


def make_training(
    config: TrainConfig, features: FeatureSource, head: DraftHead, total_steps: int, ranks: Ranks
) -> Training:
    """What trains this head, ready for the first step."""
    device, dtype = choose_device(config.device), getattr(torch, config.number_format)
    weights, target = features.target_weights(), SimpleNamespace(**features.target_config)
    for parameter in head.to(device).parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)  # never changed, so it needs no fp32 copy
    ids = head.draft_ids.cpu()
    bias = weights.get("lm_head.bias")
    output = TargetOutput(
        weight=weights["lm_head.weight"][ids].to(device, dtype),
        bias=None if bias is None else bias[ids].to(device, dtype),
        whole_weight=weights["lm_head.weight"],
        whole_bias=bias,
        scale=logit_scale(target),
        softcap=logit_softcap(target),
    )
    ranks.copy([parameter for parameter in head.parameters() if parameter.requires_grad])
    sharded = config.shard and ranks.size > 1
    return Training(head, output, make_recipe(config, total_steps), dtype, ranks, sharded)


def target_parameters(target_config: dict[str, Any]) -> int:
    """Counted on a model without storage."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = type(AutoConfig.for_model(target_config["model_type"])).from_dict(target_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
