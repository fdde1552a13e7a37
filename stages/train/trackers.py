"""Experiment trackers, which get the measures as they are taken. None is imported unless it is asked for."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stages.errors import EagleError
from stages.train.config import Tracker

Track = Callable[[Mapping[str, Any]], None]
"""Takes a line of metrics.jsonl."""

PROJECT = "eagle"


def untracked(line: Mapping[str, Any]) -> None:
    """Sends nothing."""


def run_name(output: str) -> str:
    """`a-head` of runs/a/head: many heads are called the same, in folders that are not."""
    return "-".join([part for part in output.split("/") if part.strip(".")][-2:])


@contextmanager
def tracking(kind: Tracker | None, output: str, settings: Mapping[str, Any]) -> Iterator[Track]:
    """A run named after the output, in project "eagle"; where that is, the tracker's own settings say.

    A training that continues adds to the run of that name where the tracker can (all but MLflow).

    Args:
        settings: what the head is made of, shown with the run.

    Raises:
        EagleError: the tracker is not installed.
    """
    if kind is None:
        yield untracked
        return
    module, name = _imported(kind), run_name(output)
    if kind == "tensorboard":
        with module.SummaryWriter(f"tensorboard/{name}") as writer:
            yield lambda line: _write_scalars(writer, line)
    elif kind == "mlflow":
        module.set_experiment(PROJECT)
        with module.start_run(run_name=name):
            module.log_params(dict(settings))
            yield lambda line: module.log_metrics(scalars(line), step=line["step"])
    else:  # wandb, and trackio with the same calls
        identity = hashlib.sha256(output.encode()).hexdigest()[:8]
        continued = {"resume": "allow"} | ({"id": f"{name}-{identity}"} if kind == "wandb" else {})
        run = module.init(project=PROJECT, name=name, config=dict(settings), **continued)
        try:
            yield lambda line: run.log(scalars(line), step=line["step"])
        finally:
            run.finish()


def scalars(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """A line of metrics.jsonl as one level of numbers: `holdout/sampled/overlap/2`, steps from 1."""
    flat: dict[str, float] = {}
    for key, value in line.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= scalars(value, f"{name}/")
        elif isinstance(value, list | tuple):
            flat |= {f"{name}/{place}": number for place, number in enumerate(value, start=1)}
        else:
            flat[name] = value
    return flat


def _write_scalars(writer: Any, line: Mapping[str, Any]) -> None:
    for name, value in scalars(line).items():
        writer.add_scalar(name, value, line["step"])


def _imported(kind: Tracker) -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard" if kind == "tensorboard" else kind)
    except ImportError as error:
        raise EagleError(
            f"--track {kind} cannot be imported ({error}): pip install 'eagle-decoding[{kind}]', or leave it "
            "out"
        ) from error
