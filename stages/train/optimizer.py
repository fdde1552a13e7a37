"""What changes the fp32 weights by their gradients, at a learning rate that is a function of the step alone.

Muon (Jordan et al. 2024; arXiv 2502.16982) makes the update of a matrix orthogonal before it is taken, so
that all its directions are learnt equally fast: a head needs about half the steps. It takes the matrices
between features and last state; the output rows, which are an embedding, and the norms are AdamW's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stages.train.config import OptimizerKind, Schedule

BETAS = (0.9, 0.95)
CLIP = 0.5

MUON_RATE = 20.0
"""Muon's learning rate over that of AdamW: an orthogonal update is small in each number."""

FALLING = 0.2
"""Last share of the steps, in which `wsd` falls."""


class HeadOptimizer:
    """AdamW, or Muon and AdamW, each on its weights."""

    def __init__(self, parts: Sequence[tuple[torch.optim.Optimizer, float]]) -> None:
        """Args:
        parts: each with its learning rate over that of the whole.
        """
        self._parts = parts

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        for part, _ in self._parts:
            part.zero_grad(set_to_none=True)

    def step(self, lr: float) -> None:
        """Changes the weights by their gradients."""
        for part, rate in self._parts:
            for group in part.param_groups:
                group["lr"] = lr * rate
            part.step()

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What is kept of a weight between steps, by name; zeros where no step has been taken."""
        part = next(
            part
            for part, _ in self._parts
            if any(parameter is other for group in part.param_groups for other in group["params"])
        )
        state = part.state[parameter]
        if not state:
            if isinstance(part, torch.optim.Muon):
                state["momentum_buffer"] = torch.zeros_like(parameter.detach())
            else:
                state["step"] = torch.zeros((), device=parameter.device)
                state |= {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
        return state


def make_optimizer(head: nn.Module, kind: OptimizerKind, lr: float, weight_decay: float) -> HeadOptimizer:
    """For everything that is trained; only matrices decay, as norms have no scale to lose."""
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    hidden = [p for name, p in trained.items() if kind == "muon" and p.dim() == 2 and "lm_head" not in name]
    others = [p for p in trained.values() if not any(p is one for one in hidden)]
    parts: list[tuple[torch.optim.Optimizer, float]] = []
    if hidden:
        muon = torch.optim.Muon(hidden, lr=lr * MUON_RATE, weight_decay=weight_decay)
        parts.append((muon, MUON_RATE))
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if groups := [group for group in groups if group["params"]]:
        parts.append((torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True), 1.0))
    return HeadOptimizer(parts)


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
