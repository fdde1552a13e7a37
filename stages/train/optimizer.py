"""AdamW on fp32 weights, with a learning rate that is a function of the step alone."""

from __future__ import annotations

import math

import torch
from torch import nn

from stages.train.config import Schedule

BETAS = (0.9, 0.95)
CLIP = 0.5

FALLING = 0.2
"""Last share of the steps, in which `wsd` falls."""


def make_optimizer(head: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW on everything that is trained; only matrices decay, as norms have no scale to lose."""
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=BETAS, fused=True)


def learning_rate(step: int, total: int, highest: float, warmup: float, schedule: Schedule) -> float:
    """Of optimizer step 0 .. total-1: rises linearly over the share `warmup`, then as `schedule` says.

    cosine falls to 0; constant stays; wsd (warm-up, stable, decay) stays and falls to 0 in a line at the end.
    """
    rising = math.ceil(warmup * total)
    if step < rising:
        return highest * (step + 1) / rising
    if schedule == "constant":
        return highest
    if schedule == "cosine":
        return highest * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(total - rising, 1)))
    return highest * min(1.0, (total - step) / math.ceil(FALLING * total))
