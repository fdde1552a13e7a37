"""AdamW on fp32 weights, with a learning rate that is a function of the step alone."""

from __future__ import annotations

import math

import torch
from torch import nn

BETAS = (0.9, 0.95)
CLIP = 0.5


def make_optimizer(head: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW without weight decay on everything that is trained."""
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, betas=BETAS, weight_decay=0.0, fused=True)


def learning_rate(step: int, total: int, highest: float, warmup: float) -> float:
    """Of optimizer step 0 .. total-1: rises linearly over the share `warmup`, then falls to 0 as a cosine."""
    rising = math.ceil(warmup * total)
    if step < rising:
        return highest * (step + 1) / rising
    return highest * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(total - rising, 1)))
