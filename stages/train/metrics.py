"""The training measures, as sums and counts, so that they do not depend on how rows are batched."""

from __future__ import annotations

from typing import Any

import torch

from stages.train.loss import StepLosses


class Interval:
    """The training measures since the last line of the log."""

    def __init__(self, steps: int, sums: list[list[float]] | None = None) -> None:
        """Begins with the `sums` of the run that this one continues, if there are any."""
        zero = [[0.0] * steps] * 4  # loss, counted, agreed, asked
        self._sums = torch.tensor(sums or zero, dtype=torch.float64)

    def add(self, losses: StepLosses) -> None:
        parts = (losses.loss_sum, losses.counted, losses.agreed, losses.asked)
        self._sums += torch.stack([part.double().cpu() for part in parts])

    @property
    def sums(self) -> list[list[float]]:
        return self._sums.tolist()

    @property
    def loss(self) -> list[float]:
        """[S], mean loss of each draft step, in nats."""
        return (self._sums[0] / self._sums[1].clamp(min=1)).tolist()

    @property
    def agreement(self) -> list[float]:
        """[S], top-1 agreement; a tie counts as agreement."""
        return (self._sums[2] / self._sums[3].clamp(min=1)).tolist()

    def record(self) -> dict[str, Any]:
        return {
            "loss": [round(loss, 5) for loss in self.loss],
            "agreement": [round(rate, 5) for rate in self.agreement],
            "counted": self._sums[1].long().tolist(),
            "asked": self._sums[3].long().tolist(),
        }
