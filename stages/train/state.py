"""What training changes, whole or shared out: weights, optimizer state, and the best weights so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stages.train.optimizer import HeadOptimizer
from stages.train.ranks import Ranks
from stages.train.sharding import fill, part, whole


class Best:
    """The weights of the best evaluation so far, as far as this process has them, on the CPU."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def keep(self, head: nn.Module) -> None:
        self.weights = {name: part(p).to("cpu", copy=True) for name, p in trained(head).items()}

    def put_back(self, head: nn.Module) -> None:
        """Makes them the weights of `head`, if there are any."""
        for name, parameter in trained(head).items():
            if name in self.weights:
                part(parameter).copy_(self.weights[name])


@dataclass(frozen=True)
class TrainingState:
    """The tensors of a checkpoint. All processes call each method together."""

    head: nn.Module
    optimizer: HeadOptimizer
    best: Best
    ranks: Ranks

    def saved(self, *, best: bool) -> dict[str, Tensor]:
        """Whole tensors by name, on the CPU; none in processes other than the first.

        Args:
            best: with the best weights, where they are others than the present ones.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in self._tensors().items():
            self._add(found, name, tensor)
        if best:
            for name, kept in self.best.weights.items():
                filled = torch.empty_like(trained(self.head)[name])
                part(filled).copy_(kept)
                self._add(found, f"best.{name}", filled)
        return found

    def restore(self, saved: Mapping[str, Tensor] | None, *, best: bool) -> None:
        """Puts what the first process was saved in place of what is there.

        Args:
            saved: None in processes other than the first.
            best: as it was saved.
        """
        for name, tensor in self._tensors().items():
            fill(tensor, saved[name] if saved else None, self.ranks)
        for name, parameter in trained(self.head).items() if best else ():
            filled = torch.empty_like(parameter.detach())
            fill(filled, saved[f"best.{name}"] if saved else None, self.ranks)
            self.best.weights[name] = part(filled).cpu()

    def shapes(self, *, best: bool) -> dict[str, tuple[int, ...]]:
        """Of what is saved, by name."""
        found = {name: tuple(tensor.shape) for name, tensor in self._tensors().items()}
        of_best = trained(self.head).items() if best else ()
        return found | {f"best.{name}": tuple(parameter.shape) for name, parameter in of_best}

    def _tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer state; one of zeros is made where no step has been taken."""
        found: dict[str, Tensor] = {}
        for name, parameter in trained(self.head).items():
            found[f"weights.{name}"] = parameter.detach()
            found |= {f"{key}.{name}": value for key, value in self.optimizer.state(parameter).items()}
        return found

    def _add(self, found: dict[str, Tensor], name: str, tensor: Tensor) -> None:
        gathered = whole(tensor)
        if self.ranks.first:
            found[name] = gathered.detach().cpu().contiguous()


def trained(head: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
