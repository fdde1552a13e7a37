"""Where a killed training run continues: weights, optimizer state, position and log, in one safetensors file.

Nothing else is needed. Training draws no random numbers; the order of rows is a function of seed and epoch,
and the learning rate one of the step. So a run that continues ends in the same weights, bit for bit, as one
that was never stopped. A file is written whole or not at all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from stages.artifacts import ArtifactWriter, join
from stages.errors import EagleError

CHECKPOINT = "checkpoint.safetensors"

SAVE_SHARE = 0.02
"""Most of the time that saving may take, unless checkpoints are asked for all the time (0 seconds apart)."""


@dataclass
class Progress:
    """How far training is; JSON values only."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # supervised tokens seen, all epochs
    seconds: float = 0.0  # spent in training and evaluation, by all runs
    waited: float = 0.0  # of these, for rows that were not ready
    window_bytes: int = 0  # of the windows that rows are shuffled in, which decide their order
    log: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl

    def log_line(self, measures: dict[str, Any], seconds: float, waited: float) -> None:
        """Adds a line about the present step; the times are those spent so far."""
        self.seconds, self.waited = seconds, waited
        times = {"seconds": round(seconds, 1), "waited": round(waited, 1)}
        self.log.append({"step": self.step, "tokens": self.tokens} | times | measures)

    @property
    def holdout(self) -> dict[str, Any]:
        """What the last evaluation measured; empty if there was none."""
        return next((line["holdout"] for line in reversed(self.log) if "holdout" in line), {})

    @property
    def waiting(self) -> float:
        """Share of the time that was spent waiting for rows."""
        return self.waited / self.seconds if self.seconds else 0.0


class SaveClock:
    """Says when to save: not more often than asked for, nor so often that saving takes a notable share of the
    time.

    Use as a context manager around the saving.
    """

    def __init__(self, every_seconds: float) -> None:
        self._every = every_seconds
        self._start = self._saved = time.monotonic()
        self._pause = every_seconds

    def due(self) -> bool:
        return time.monotonic() - self._saved >= self._pause

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._saved = time.monotonic()
        self._pause = max(self._every, (self._saved - self._start) / SAVE_SHARE if self._every > 0 else 0.0)


def save_checkpoint(
    writer: ArtifactWriter, head: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Writes a checkpoint in place of the last one."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in _trained(head).items():
        tensors[f"weights.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    writer.add_file(CHECKPOINT, safetensors.torch.save(tensors, {"progress": json.dumps(vars(progress))}))


@dataclass(frozen=True)
class Checkpoint:
    """What an earlier run has saved."""

    uri: str  # for messages
    path: Path
    progress: Progress

    @classmethod
    def find(cls, writer: ArtifactWriter) -> Checkpoint | None:
        """The checkpoint beside the unfinished head; None if there is none.

        Raises:
            EagleError: it cannot be read.
        """
        if not any(file.path == CHECKPOINT for file in writer.files):
            return None
        uri, path = join(writer.uri, CHECKPOINT), writer.local(CHECKPOINT)
        with _misfits(uri), safe_open(path, "pt") as file:
            return cls(uri, path, Progress(**json.loads(file.metadata()["progress"])))

    def restore(self, head: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Puts weights and optimizer state in place of those of `head` and `optimizer`.

        Raises:
            EagleError: they cannot be read, or are of a head of another shape.
        """
        with _misfits(self.uri), torch.no_grad():
            tensors = safetensors.torch.load_file(self.path)
            for name, parameter in _trained(head).items():
                parameter.copy_(tensors.pop(f"weights.{name}"))
                state = {key: tensors.pop(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {
                    key: value.to(parameter.device, copy=True) for key, value in state.items()
                }


@contextmanager
def _misfits(uri: str) -> Iterator[None]:
    try:
        yield
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise EagleError(f"{uri} does not fit ({error}): run again with --overwrite to start anew") from error


def _trained(head: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
