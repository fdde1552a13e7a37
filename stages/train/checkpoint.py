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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import safe_open
from torch import Tensor

from stages.artifacts import ArtifactWriter, join
from stages.config import several
from stages.errors import EagleError
from stages.train.acceptance import Acceptance
from stages.train.state import TrainingState

SAVE_SHARE = 0.02
"""Most of the time that saving may take, unless checkpoints are asked for all the time (0 seconds apart)."""

_NAME = re.compile(r"checkpoint(-\d+)?\.safetensors")


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
    def best_is_another(self) -> bool:
        """Whether the best weights are not the present ones."""
        return self.best_step not in (0, self.step)

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


class Checkpoints:
    """Saves to the unfinished head, not more often than asked for, nor so often that it takes a notable share
    of the time.
    """

    def __init__(self, writer: ArtifactWriter | None, every_seconds: float, keep: int) -> None:
        """`writer` is None where another process writes."""
        self._writer = writer
        self._keep = keep
        self._every = self._pause = every_seconds
        self._saved = time.monotonic()

    def due(self) -> bool:
        """In the process that writes."""
        return self._writer is not None and time.monotonic() - self._saved >= self._pause

    def save(self, state: TrainingState, progress: Progress) -> None:
        """Writes a checkpoint, in place of the oldest one where as many as are to be kept are there.

        All processes call it together.
        """
        began = time.monotonic()
        tensors = state.saved(best=progress.best_is_another)
        if self._writer is None:
            return
        number = progress.saves % self._keep
        progress.saves += 1
        name = "checkpoint.safetensors" if number == 0 else f"checkpoint-{number}.safetensors"
        metadata = {"progress": json.dumps(vars(progress))}
        self._writer.add_file(name, safetensors.torch.save(tensors, metadata))
        self._saved = time.monotonic()
        self._pause = max(self._every, (self._saved - began) / SAVE_SHARE if self._every > 0 else 0.0)


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
                f"{self.uri} is of {several(before, 'process')} that train together, now there are "
                f"{processes}: start {before} with torchrun, or use --overwrite to start anew"
            )

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Those of these names.

        Raises:
            EagleError: they cannot be read, or are of a head of another shape.
        """
        with _misfits(self.uri):
            tensors = safetensors.torch.load_file(self.path)
            for name, shape in shapes.items():
                if (found := tuple(tensors[name].shape)) != shape:
                    raise ValueError(f"{name} has shape {found}, not {shape}")
        return tensors


def restore(checkpoint: Checkpoint | None, progress: Progress, state: TrainingState) -> None:
    """Puts what was saved with `progress` in place of weights and optimizer state.

    All processes call it together; the first has the checkpoint.

    Raises:
        EagleError: it cannot be read, or is of a head of another shape.
    """
    best = progress.best_is_another
    state.restore(checkpoint.tensors(state.shapes(best=best)) if checkpoint else None, best=best)
    if progress.best_step == progress.step:
        state.best.keep(state.head)


@contextmanager
def _misfits(uri: str) -> Iterator[None]:
    try:
        yield
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise EagleError(f"{uri} does not fit ({error}): run again with --overwrite to start anew") from error
