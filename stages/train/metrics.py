"""Training and held-out measures, as sums and counts, so that they do not depend on how rows are batched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.heads import Eagle3Head
from stages.train.batch import TttBatch
from stages.train.loss import StepLosses
from stages.train.ttt import ttt_hidden

LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Agreement:
    """How often the head's most likely token is the target's, on rows it has not trained on.

    Tokens outside the draft vocabulary are misses. `cycles` and `accepted` replay greedy decoding with a
    chain of S drafts over each answer: a cycle accepts the drafts before the first miss, and the next one
    starts behind the token that the target puts in its place. So cycles start at hard positions more often
    than at others, which is why agreement alone promises more than decoding gives.
    """

    agreed: tuple[int, ...]  # [S]
    asked: tuple[int, ...]  # [S]
    cycles: int = 0
    accepted: int = 0

    @classmethod
    def none(cls, steps: int) -> Agreement:
        return cls((0,) * steps, (0,) * steps)

    @classmethod
    def of(cls, hits: Tensor, counted: Tensor, turns: Sequence[int]) -> Agreement:
        """Of hits (whether the head agreed) and `TttBatch.counted`, [S, Q] bool, and `TttBatch.turns`."""
        hits = hits & counted
        lengths = hits.long().cumprod(0).sum(0).tolist()
        cycles = accepted = start = 0
        for turn in turns:
            query, end = start, start + turn
            while query < end:
                cycles += 1
                accepted += lengths[query]
                query += lengths[query] + 1
            start = end
        return cls(tuple(hits.sum(1).tolist()), tuple(counted.sum(1).tolist()), cycles, accepted)

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            tuple(a + b for a, b in zip(self.agreed, other.agreed, strict=True)),
            tuple(a + b for a, b in zip(self.asked, other.asked, strict=True)),
            self.cycles + other.cycles,
            self.accepted + other.accepted,
        )

    @property
    def rates(self) -> tuple[float, ...]:
        """[S], top-1 agreement of each draft step; 0 where nothing was asked."""
        return tuple(a / max(n, 1) for a, n in zip(self.agreed, self.asked, strict=True))

    @property
    def accepted_per_step(self) -> float:
        """Drafts accepted per verification."""
        return self.accepted / max(self.cycles, 1)

    @property
    def tokens_per_step(self) -> float:
        """With the token that the target adds."""
        return 1 + self.accepted_per_step

    def record(self) -> dict[str, Any]:
        return {
            "agreement": [round(rate, 5) for rate in self.rates],
            "accepted_per_step": round(self.accepted_per_step, 5),
            "tokens_per_step": round(self.tokens_per_step, 5),
            "agreed": list(self.agreed),
            "asked": list(self.asked),
            "cycles": self.cycles,
            "accepted": self.accepted,
        }

    def __str__(self) -> str:
        return f"{format_rates(self.rates)}, {self.tokens_per_step:.2f} tokens a step"


@torch.no_grad()
def measure_agreement(head: Eagle3Head, batch: TttBatch, steps: int) -> Agreement:
    """What the head in its present state agrees with the target in on a batch."""
    hidden = ttt_hidden(head, batch, steps)
    target_ids = torch.cat((batch.target_argmax, batch.target_argmax.new_full((steps,), -1)))
    at_once = max(1, LOGITS_AT_ONCE // head.config.draft_vocab_size)
    hits = []
    for step, states in enumerate(hidden):
        drafted = torch.cat([head.logits(piece).argmax(-1) for piece in states.split(at_once)])
        hits.append(head.draft_ids[drafted] == target_ids[step : step + len(states)])
    return Agreement.of(torch.stack(hits), batch.counted, batch.turns)


class Interval:
    """The training measures since the last line of the log."""

    def __init__(self, steps: int) -> None:
        self._sums = torch.zeros(4, steps, dtype=torch.float64)  # loss, counted, agreed, asked

    def add(self, losses: StepLosses) -> None:
        parts = (losses.loss_sum, losses.counted, losses.agreed, losses.asked)
        self._sums += torch.stack([part.double().cpu() for part in parts])

    @property
    def loss(self) -> list[float]:
        """[S], mean soft cross-entropy in nats."""
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


def format_rates(rates: Sequence[float]) -> str:
    """`.59/.51/.46`"""
    return "/".join(f"{rate:.2f}".removeprefix("0") for rate in rates)
