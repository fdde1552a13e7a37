"""Where a killed training run continues: weights, optimizer state, position and log, in one safetensors file.

Nothing else is needed. The order of rows is a function of seed and epoch, the learning rate one of the step,
and random numbers are drawn from the seed and the step. So a run that continues ends in the same weights,
bit for bit, as one that was never stopped. A file is written whole or not at all; where several are kept
they take turns.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from stages.artifacts import ArtifactWriter, join
from stages.errors import EagleError
from stages.train.acceptance import Acceptance

SAVE_SHARE = 0.02
"""Most of the time that saving may take, unless checkpoints are asked for all the time (0 seconds apart)."""

_NAME = re.compile(r"checkpoint(-\d+)?\.safetensors")
_STATE = ("step", "exp_avg", "exp_avg_sq")


@dataclass
class Progress:
    """How far training is; JSON values only."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # supervised tokens seen, all epochs
    seconds: float = 0.0  # spent in training and evaluation, by all runs
    waited: float = 0.0  # of these, for rows that were not ready
    window_bytes: int = 0  # of the windows that rows are shuffled in, which decide their order
    processes: int = 1  # that train together
    saves: int = 0  # checkpoints written
    best_step: int = 0  # of the evaluation with the most tokens per step; 0 before the first
    best_tokens_per_step: float = 0.0
    worse: int = 0  # evaluations since the best
    interval: list[list[float]] = field(default_factory=list)  # sums since the last line of the log
    log: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl

    def log_line(self, measures: dict[str, Any], seconds: float, waited: float) -> dict[str, Any]:
        """Adds a line about the present step, and returns it; the times are those spent so far."""
        self.seconds, self.waited = seconds, waited
        times = {"seconds": round(seconds, 1), "waited": round(waited, 1)}
        self.log.append({"step": self.step, "tokens": self.tokens} | times | measures)
        return self.log[-1]

    def evaluated(self, found: Acceptance) -> bool:
        """Takes note of an evaluation; says whether it is better than all before."""
        if self.best_step and found.tokens_per_step <= self.best_tokens_per_step:
            self.worse += 1
            return False
        self.best_step, self.best_tokens_per_step, self.worse = self.step, found.tokens_per_step, 0
        return True

    @property
    def holdout(self) -> dict[str, Any]:
        """What the best evaluation measured; empty if there was none."""
        lines = (line for line in self.log if "holdout" in line and line["step"] == self.best_step)
        return next((line["holdout"] for line in lines), {})

    def counts(self) -> dict[str, Any]:
        """For the manifest of the finished head."""
        return {
            "steps": self.step,
            "best_step": self.best_step or self.step,
            "train_tokens": self.tokens,
            "processes": self.processes,
            "window_bytes": self.window_bytes,
            "waiting": round(self.waiting, 4),
            "holdout": self.holdout,
        }

    @property
    def waiting(self) -> float:
        """Share of the time that was spent waiting for rows."""
        return self.waited / self.seconds if self.seconds else 0.0


class Best:
    """The weights of the best evaluation so far, on the CPU."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def keep(self, head: nn.Module) -> None:
        self.weights = {name: p.detach().to("cpu", copy=True) for name, p in _trained(head).items()}

    def put_back(self, head: nn.Module) -> None:
        """Makes them the weights of `head`, if there are any."""
        with torch.no_grad():
            for name, parameter in _trained(head).items():
                if name in self.weights:
                    parameter.copy_(self.weights[name])


class Checkpoints:
    """Saves to the unfinished head, not more often than asked for, nor so often that it takes a notable share
    of the time.
    """

    def __init__(self, writer: ArtifactWriter, every_seconds: float, keep: int) -> None:
        self._writer = writer
        self._keep = keep
        self._every = self._pause = every_seconds
        self._saved = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._saved >= self._pause

    def save(self, head: nn.Module, optimizer: torch.optim.Optimizer, best: Best, progress: Progress) -> None:
        """Writes a checkpoint, in place of the oldest one where as many as are to be kept are there."""
        began = time.monotonic()
        number = progress.saves % self._keep
        progress.saves += 1
        save_checkpoint(self._writer, head, optimizer, best, progress, number)
        self._saved = time.monotonic()
        self._pause = max(self._every, (self._saved - began) / SAVE_SHARE if self._every > 0 else 0.0)


def save_checkpoint(
    writer: ArtifactWriter,
    head: nn.Module,
    optimizer: torch.optim.Optimizer,
    best: Best,
    progress: Progress,
    number: int = 0,
) -> None:
    """Writes checkpoint `number` of those that take turns."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(head).items():
        tensors[f"weights.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    if progress.best_step != progress.step:
        tensors |= {f"best.{name}": tensor for name, tensor in best.weights.items()}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    name = "checkpoint.safetensors" if number == 0 else f"checkpoint-{number}.safetensors"
    writer.add_file(name, safetensors.torch.save(tensors, {"progress": json.dumps(vars(progress))}))


def checkpoint_names(writer: ArtifactWriter) -> list[str]:
    return [file.path for file in writer.files if _NAME.fullmatch(file.path)]


@dataclass(frozen=True)
class Checkpoint:
    """What an earlier run has saved."""

    uri: str  # for messages
    path: Path
    progress: Progress

    @classmethod
    def find(cls, writer: ArtifactWriter) -> Checkpoint | None:
        """The newest checkpoint beside the unfinished head that can be read; None if there is none.

        Raises:
            EagleError: there are some, and none can be read.
        """
        found: list[Checkpoint] = []
        unread: EagleError | None = None
        for name in checkpoint_names(writer):
            try:
                found.append(cls._read(join(writer.uri, name), writer.local(name)))
            except EagleError as error:
                unread = error
        if unread is not None and not found:
            raise unread
        return max(found, key=lambda each: each.progress.step, default=None)

    @classmethod
    def _read(cls, uri: str, path: Path) -> Checkpoint:
        with _misfits(uri), safe_open(path, "pt") as file:
            return cls(uri, path, Progress(**json.loads(file.metadata()["progress"])))

    def check_processes(self, processes: int) -> None:
        """Raises EagleError: it was written by another number of processes than go on now."""
        if (before := self.progress.processes) != processes:
            raise EagleError(
                f"{self.uri} is of {before} processes that train together, now there are {processes}: start "
                f"{before} with torchrun, or use --overwrite to start anew"
            )

    def restore(self, head: nn.Module, optimizer: torch.optim.Optimizer, best: Best) -> None:
        """Puts weights and optimizer state in place of those of `head` and `optimizer`.

        Raises:
            EagleError: they cannot be read, or are of a head of another shape.
        """
        with _misfits(self.uri), torch.no_grad():
            tensors = safetensors.torch.load_file(self.path)
            for name, parameter in _trained(head).items():
                parameter.copy_(tensors.pop(f"weights.{name}"))
                state = {key: tensors.pop(f"{key}.{name}") for key in _STATE}
                optimizer.state[parameter] = {
                    key: value.to(parameter.device, copy=True) for key, value in state.items()
                }
            best.weights = {
                name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")
            }
        if self.progress.best_step and self.progress.best_step == self.progress.step:
            best.keep(head)


def training_state(head: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and optimizer state in a fixed order; a state of zeros is made where no step has been taken."""
    tensors: list[Tensor] = []
    for parameter in _trained(head).values():
        state = optimizer.state[parameter]
        if not state:
            zeros = (
                torch.zeros((), device=parameter.device),
                *(torch.zeros_like(parameter) for _ in range(2)),
            )
            state.update(zip(_STATE, zeros, strict=True))
        tensors += [parameter.detach(), *(state[key] for key in _STATE)]
    return tensors


@contextmanager
def _misfits(uri: str) -> Iterator[None]:
    try:
        yield
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise EagleError(f"{uri} does not fit ({error}): run again with --overwrite to start anew") from error


def _trained(head: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
