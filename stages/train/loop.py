"""The optimizer steps of a plan, with evaluations, log lines and checkpoints on the way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from stages.features.index import RowIndex
from stages.features.source import FeatureSource
from stages.progress import Reporter, Task
from stages.train.acceptance import format_rates
from stages.train.checkpoint import Checkpoints, Progress
from stages.train.config import TrainConfig
from stages.train.data import Batch, TrainingPlan, share_out, split_batches
from stages.train.loader import Loader
from stages.train.metrics import Interval
from stages.train.reading import HeldOutRows, read_steps
from stages.train.state import TrainingState
from stages.train.stopping import StopSignal
from stages.train.trackers import Track
from stages.train.training import Training

LOG_EVERY = 10
"""Optimizer steps in a line of metrics.jsonl."""

HOLDOUT_BATCH_TOKENS = 4096


class Loop:
    """Takes the steps of the plan that `progress` lacks.

    Attributes:
        held_rows: this process's share of the rows that are not trained on.
        ended: why it ended before the end of the plan, or "".
    """

    def __init__(
        self,
        training: Training,
        features: FeatureSource,
        plan: TrainingPlan,
        held_out: Sequence[RowIndex],
        progress: Progress,
        state: TrainingState,
        checkpoints: Checkpoints,
        track: Track,
        config: TrainConfig,
        report: Reporter,
    ) -> None:
        self._training = training
        self._features = features
        self._plan = plan
        self._progress = progress
        self._state = state
        self._checkpoints = checkpoints
        self._track = track
        self._config = config
        self._report = report
        self._evaluated = _evaluation_steps(plan, config.eval_every) if held_out else set()
        self._interval = Interval(config.ttt_steps, progress.interval)
        ranks = training.ranks
        # Shares of whole batches, so that what is measured does not depend on the number of processes.
        batches = split_batches(held_out, HOLDOUT_BATCH_TOKENS) if held_out else ()
        self.held_rows = HeldOutRows(batches[ranks.rank :: ranks.size])
        self.ended = ""
        self._began = time.monotonic() - progress.seconds
        self._waited = progress.waited

    def run(self, stop: StopSignal) -> None:
        """Raises:
        EagleError: the loss is not finite, or rows cannot be read.
        BaseException: what `stop` delivers, once the step is done and saved.
        """
        progress, plan, training = self._progress, self._plan, self._training
        rows = read_steps(self._features, plan.after(progress.step), self.held_rows, self._share)
        loader = Loader(rows, training.batch, self._features.close, lambda: stop.received)
        with (
            self._report.task("training", total=plan.tokens, unit="tok", done=progress.tokens) as task,
            loader,
        ):
            steps = iter(loader)
            while True:
                batches = next(steps, None)
                if training.ranks.most(int(stop.received), training.device):
                    self._save()
                    stop.deliver()
                if batches is None:
                    return
                losses = training.step(batches, progress.step)
                self._interval.add(losses)
                tokens = int(losses.asked[0])
                progress.step += 1
                progress.tokens += tokens
                task.advance(tokens)
                evaluates = progress.step in self._evaluated
                if progress.step % LOG_EVERY and not evaluates and progress.step < plan.steps:
                    continue
                self._log_interval(task, loader)
                if evaluates:
                    self._evaluate(loader)
                    if self._config.patience is not None and progress.worse >= self._config.patience:
                        self.ended = f"{progress.worse} evaluations without more tokens per step"
                        return
                if training.ranks.told(self._checkpoints.due()):
                    self._save()

    def _share(self, batch: Batch) -> list[Batch]:
        ranks = self._training.ranks
        return share_out(batch, ranks.size, self._config.micro_batch_tokens)[ranks.rank]

    def _log_interval(self, task: Task, loader: Loader) -> None:
        self._log(self._interval.record(), loader)
        interval, progress = self._interval, self._progress
        note = f"loss {interval.loss[0]:.3f}, agreement {format_rates(interval.agreement)}"
        task.note(f"{note}, {progress.waiting:.0%} waiting")
        self._interval = Interval(self._config.ttt_steps)

    def _evaluate(self, loader: Loader) -> None:
        progress, training = self._progress, self._training
        found = training.evaluate(self.held_rows.batches(self._features), self._config.measured_steps)
        if progress.evaluated(found):
            self._state.best.keep(training.head)
        self._report.log(f"step {progress.step:,} of {self._plan.steps:,}, held out: agreement {found}")
        self._log({"holdout": found.record()}, loader)

    def _log(self, measures: dict[str, Any], loader: Loader) -> None:
        waited = self._waited + loader.waited + self.held_rows.waited
        line = self._progress.log_line(measures, time.monotonic() - self._began, waited)
        self._track(line)

    def _save(self) -> None:
        if self._progress.step:
            self._progress.interval = self._interval.sums
            self._checkpoints.save(self._state, self._progress)


def _evaluation_steps(plan: TrainingPlan, every: int | None) -> set[int]:
    steps = plan.epoch_ends if every is None else range(every, plan.steps, every)
    return {*steps, plan.steps}
