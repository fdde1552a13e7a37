"""The gate: measure, compare, and where the two differ look for the cause by trying.

What is measured, each time of the code that serves:

- logits: the drafter is fed the states that training was fed, in float32, and its logits are compared with
  training's. They differ only if the head's maths, weights or settings do.
- states: the target's at the head's feature layers are compared with those that training was fed. Formats and
  rounding leave 1 % or so between them, and the layer beside the right one 20 % or more.
- tokens a step: the engine decodes the held-out answers with a chain, on its own states of the target, and
  its verify steps are compared with those that training predicts for the same stretches of text.
- the drafter alone, along the rows, on the target's states: what suspects are tried with, as it costs the
  target one forward a row.

Sampling noise: both sides are counted over the same text (`replay`), so that the difference between them has
a fraction of the variance of either. The 95 % interval of the gap is a bootstrap over conversations; rows are
replayed until it is narrow enough to decide, and the gate fails only if all of it lies beyond the bound.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from stages.decoding.model import EagleModel
from stages.decoding.parity.drafts import Drafts, draft_along, own_tokens
from stages.decoding.parity.record import ExpectedRow, ParityRecord, digest_of
from stages.decoding.parity.replay import Cycles, ReplayedRow, replay_row, turns, walk
from stages.decoding.parity.report import BOUND, ParityReport, Tried
from stages.decoding.parity.states import live_states, stored_states
from stages.decoding.parity.suspects import Suspect, inputs, layers_of, maths
from stages.decoding.tree import TreeConfig
from stages.errors import EagleError
from stages.features.layout import FeatureRow
from stages.heads import DraftHead
from stages.progress import Reporter
from stages.targets import Target

LOGITS_BOUND = 1e-4
STATES_BOUND = 0.1
LEAST_ROWS = 4
"""For an interval; and what suspects are tried on."""

NARROW = BOUND / 2
"""Half-width of the interval at which no more rows are needed."""

_RESAMPLES = 2000


def check_parity(
    target: Target,
    head: DraftHead,
    record: ParityRecord,
    rows: Iterable[FeatureRow],
    *,
    float32_target: Callable[[], Target] | None = None,
    report: Reporter,
) -> ParityReport:
    """Replays rows of the record, as many as it takes.

    Args:
        target: what serves, in its dtype.
        head: in float32, with the weights of its file. What serves is a copy in the target's dtype.
        rows: with the states that training was fed; where they have none, logits are not compared.
        float32_target: loads the target once more, to try whether the number format is the cause.

    Raises:
        EagleError: no row is one of the record's.
    """
    known = {row.digest: row for row in record.rows}
    model = EagleModel(target, _cast(head, target.dtype), TreeConfig.parse(f"chain:depth={record.steps}"))
    pairs: list[tuple[FeatureRow, ExpectedRow]] = []
    replayed: list[ReplayedRow] = []
    with report.task("parity", unit="rows") as task:
        for row in rows:
            expected = known.get(digest_of(row.input_ids))
            if expected is None:
                continue
            pairs.append((row, expected))
            replayed.append(replay_row(model, row, expected))
            task.advance()
            low, high = _interval(replayed) or (-1.0, 1.0)
            if high - low < 2 * NARROW and len(replayed) >= 2 * LEAST_ROWS:
                break
    if not pairs:
        raise EagleError(
            "none of the held-out conversations that training has recorded is among the rows: give the "
            "features that the head was trained on"
        )
    trial = _Trial(target, head, record, pairs[:LEAST_ROWS], float32_target)
    stored = all(stored_states(row, head) is not None for row, _ in trial.pairs)
    compared, difference = trial.logits(head) if stored else (0, None)
    served = Suspect("decode loop", "", head, layers_of(head, target))
    predicted = sum((each.predicted for each in replayed), Cycles())
    measured = sum((each.measured for each in replayed), Cycles())
    found = ParityReport(
        dtype=str(target.dtype).removeprefix("torch."),
        steps=record.steps,
        rows=len(pairs),
        cycles=measured.steps,
        predicted_tokens_per_step=predicted.tokens_per_step,
        measured_tokens_per_step=measured.tokens_per_step,
        gap=1 - measured.tokens_per_step / predicted.tokens_per_step,
        gap_ci95=_interval(replayed),
        logits_compared=compared,
        logits_difference=difference,
        logits_bound=LOGITS_BOUND,
        states_difference=trial.states(served) if stored else None,
        states_bound=STATES_BOUND,
        cause=None,
        change=None,
        tried=[],
        warnings=_template_warning(target, [row for row, _ in pairs]),
    )
    return trial.explained(found, served) if found.failed else found


@dataclass(frozen=True)
class _Trial:
    """Suspects are tried on a few rows, by the drafter alone."""

    target: Target
    head: DraftHead
    record: ParityRecord
    pairs: Sequence[tuple[FeatureRow, ExpectedRow]]
    float32_target: Callable[[], Target] | None

    def logits(self, head: DraftHead) -> tuple[int, float | None]:
        """How many logits were compared with training's, and the largest difference; in float32.

        Those of step i are training's only where the i tokens drafted before are the row's own, which is what
        training feeds.
        """
        differences = []
        for row, expected in self.pairs:
            states = stored_states(row, head)
            assert states is not None
            differences.append(_logit_difference(self._draft(head, states.float(), row), expected, row))
        compared = torch.cat(differences)
        return len(compared), float(compared.max()) if len(compared) else None

    def states(self, suspect: Suspect) -> float:
        """The largest median difference of the target's states from the stored ones, over feature layers."""
        target, taps = self._target(suspect), len(suspect.layers or (0,))
        worst = 0.0
        for row, _ in self.pairs:
            live, stored = live_states(target, row, suspect.layers), stored_states(row, self.head)
            assert stored is not None
            for ours, theirs in zip(live.chunk(taps, -1), stored.float().chunk(taps, -1), strict=True):
                share = (ours.float().cpu() - theirs).norm(dim=1) / theirs.norm(dim=1).clamp(min=1e-6)
                worst = max(worst, float(share.median()))
        return worst

    def gap(self, suspect: Suspect) -> float:
        """Of the tokens a step that the drafter alone reaches, to those that training predicts."""
        target = self._target(suspect)
        head = _cast(suspect.head, target.dtype)
        predicted = reached = Cycles()
        for row, expected in self.pairs:
            states = live_states(target, row, suspect.layers)
            lengths = self._draft(head, states, row).lengths(row)
            predicted += _walk_all(row, expected.lengths)
            reached += _walk_all(row, lengths)
        return 1 - reached.tokens_per_step / predicted.tokens_per_step

    def explained(self, found: ParityReport, served: Suspect) -> ParityReport:
        """The report with the cause, if one of the suspects is."""
        half = self.float32_target is not None and self.target.dtype != torch.float32
        of_the_inputs = inputs(self.head, self.target, half=half)
        if found.logits_differ:
            within = LOGITS_BOUND
            tried = _until_gone(
                maths(self.head, self.target), lambda each: self.logits(each.head)[1] or 0.0, within
            )
        elif found.states_differ:
            within = STATES_BOUND
            causes = ("feature layers", "dtype")
            tried = _until_gone((each for each in of_the_inputs if each.cause in causes), self.states, within)
        else:
            within = BOUND
            if abs(self.gap(served)) <= within:
                return found.model_copy(update={"cause": served.cause})
            tried = _until_gone(chain(of_the_inputs, maths(self.head, self.target)), self.gap, within)
        best = min(tried, key=lambda each: abs(each[1]), default=None)
        listed = [Tried(cause=each.cause, change=each.change, left=left) for each, left in tried]
        if best is None or not abs(best[1]) <= within:
            return found.model_copy(update={"tried": listed})
        return found.model_copy(update={"tried": listed, "cause": best[0].cause, "change": best[0].change})

    def _target(self, suspect: Suspect) -> Target:
        if suspect.float32:
            assert self.float32_target is not None
            return self.float32_target()
        return self.target

    def _draft(self, head: DraftHead, states: Tensor, row: FeatureRow) -> Drafts:
        return draft_along(self.target, head, states, row, self.record.steps, self.record.probes)


def _cast(head: DraftHead, dtype: torch.dtype) -> DraftHead:
    return copy.deepcopy(head).to(dtype)


def _until_gone(
    suspects: Iterable[Suspect], left: Callable[[Suspect], float], within: float
) -> list[tuple[Suspect, float]]:
    """What each suspect leaves of the difference; none is tried after one that leaves next to nothing."""
    tried: list[tuple[Suspect, float]] = []
    for suspect in suspects:
        tried.append((suspect, left(suspect)))
        if abs(tried[-1][1]) <= within / 5:
            break
    return tried


def _logit_difference(drafts: Drafts, expected: ExpectedRow, row: FeatureRow) -> Tensor:
    """[m]: |difference| over the largest logit on record at that step, of all that are comparable."""
    steps = drafts.tokens.shape[1]
    same = (drafts.tokens == own_tokens(row, steps)).long().cumprod(1).bool()  # [s, S]
    fed = torch.cat((torch.ones_like(same[:, :1]), same[:, :-1]), dim=1)[expected.queries]  # [n, S]
    ours, theirs = drafts.logits[expected.queries], expected.logits
    comparable = fed[..., None] & ~theirs.isnan()
    difference = (ours - theirs).abs() / theirs.abs().amax(-1, keepdim=True).clamp(min=1)
    return difference[comparable]


def _walk_all(row: FeatureRow, lengths: Tensor) -> Cycles:
    by_position = dict(zip(row.supervised.tolist(), lengths.tolist(), strict=True))
    return sum((walk(by_position, first, last + 1, last + 1) for first, last in turns(row)), Cycles())


def _interval(replayed: Sequence[ReplayedRow], seed: int = 0) -> tuple[float, float] | None:
    """95 % bootstrap interval of the gap: conversations drawn with replacement, totals over totals."""
    if len(replayed) < LEAST_ROWS:
        return None
    counts = np.array(
        [[[side.steps, side.accepted] for side in (each.predicted, each.measured)] for each in replayed]
    )  # [rows, side, (steps, accepted)]
    drawn = np.random.default_rng(seed).multinomial(
        len(replayed), [1 / len(replayed)] * len(replayed), size=_RESAMPLES
    )
    sums = np.tensordot(drawn, counts, axes=1)  # [resamples, side, 2]
    tokens = 1 + sums[..., 1] / np.maximum(sums[..., 0], 1)
    low, high = np.percentile(1 - tokens[:, 1] / tokens[:, 0], (2.5, 97.5))
    return float(low), float(high)


def _template_warning(target: Target, rows: Sequence[FeatureRow]) -> list[str]:
    """The rows' prompts are decoded as they were trained, so another template costs nothing here: but it will
    in serving. Its tokens between the user's last word and the answer are the same in every prompt."""
    if not target.tokenizer.chat_template:
        return []
    try:
        a, b = (target.render([{"role": "user", "content": text}]) for text in ("Yes.", "A longer question?"))
    except EagleError:  # it wants messages of another form
        return []
    shared = next((n for n, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)) if x != y), 0)
    ending = a[len(a) - shared :]
    other = sum(row.input_ids[: turns(row)[0][0]].tolist()[-shared:] != ending for row in rows)
    if not shared or 2 * other <= len(rows):
        return []
    return [
        f"{other} of {len(rows)} held-out prompts do not end as the target's chat template ends them: the "
        "head may have been trained on another template, and draft worse in serving than here"
    ]
