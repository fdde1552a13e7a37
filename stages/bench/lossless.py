"""Whether EAGLE's answers are the target's own, and what explains each that differs.

Both ways compute the same function, but in half precision a forward over a tree rounds differently from a
forward over one token. Where two tokens are almost equally good, either may then win, and from there the
texts go apart. Such a near-tie shows in float32: at that prefix both tokens lie within a small gap of the
highest score. Anything else is a fault, and so is any difference at all in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from kernels import gumbel_noise_vocab
from stages.bench.record import Measured, Recheck, Record, Request
from stages.decoding import SamplingParams
from stages.decoding.sampling import SamplingTensors
from stages.targets import Target

Cause = Literal["near_tie", "wide_gap", "length", "float32"]
FLOAT32 = "float32"


@dataclass(frozen=True)
class Difference:
    """Where an answer of EAGLE leaves the plain one; `position` counts output tokens from 0."""

    set: str
    prompt_id: str
    request: Request
    position: int
    dtype: str
    drafter: str = ""
    concurrency: int = 1

    @property
    def plain_token(self) -> int | None:
        return _at(self.request.plain.token_ids, self.position)

    @property
    def eagle_token(self) -> int | None:
        return _at(self.request.eagle.token_ids, self.position)

    @property
    def prefix(self) -> list[int]:
        """Prompt and output up to the token that differs."""
        return [*self.request.prompt_ids, *self.request.plain.token_ids[: self.position]]


class Divergence(Record):
    """A difference with its explanation."""

    set: str
    prompt_id: str
    turn: int
    dtype: str = Field(description="Number format of the two answers.")
    position: int = Field(description="First output token that differs, counted from 0.")
    plain_token: int | None = Field(
        description="Plain decoding's token there; null when its answer has ended."
    )
    eagle_token: int | None = Field(description="EAGLE's token there; null when its answer has ended.")
    gap: float | None = Field(
        description="How far the lower of the two tokens is below the highest score, in float32; in logits, "
        "and at a temperature of the logits with the noise of that position. Null when an answer has ended."
    )
    top_two: bool | None = Field(description="Whether the two are the highest two; null like gap.")
    cause: Cause = Field(
        description="near_tie: gap below the bound. wide_gap: not. length: one answer ends where the other "
        "goes on. float32: a difference in float32, whatever the gap. All but near_tie are faults."
    )
    drafter: str = Field(default="", description="Of a sweep: whose answer it is. Empty for the pairs.")
    concurrency: int = Field(default=1, description="Requests that were answered together.")

    @property
    def fault(self) -> bool:
        return self.cause != "near_tie"


class Float32Check(Record):
    """The prompts that were answered in float32, and those of them with nothing but identical answers."""

    prompts: int
    identical: int


class Lossless(Record):
    """The verdict over all requests, and over those that were checked in float32."""

    requests: int = Field(
        description="Answers compared with plain decoding's, those of a sweep included, without those of the "
        "float32 check."
    )
    identical: int = Field(description="Pairs with the same token ids.")
    near_ties: int = Field(description="Pairs that part at a near-tie.")
    faults: int = Field(
        description="Pairs that part for no good reason, those of the float32 check included."
    )
    near_tie_gap: float = Field(description="The bound below which a gap is a near-tie.")
    float32: Float32Check
    divergences: list[Divergence]


def differing_position(plain: Sequence[int], eagle: Sequence[int]) -> int | None:
    """Index of the first token that differs, also where one answer merely goes on; None for equal ones."""
    for position, (a, b) in enumerate(zip(plain, eagle, strict=False)):
        if a != b:
            return position
    return None if len(plain) == len(eagle) else min(len(plain), len(eagle))


def differences(
    measured: Sequence[Measured], dtype: str, drafter: str = "", concurrency: int = 1
) -> list[Difference]:
    """The answers that are not the same, in order."""
    found = []
    for record in measured:
        for request in record.requests:
            position = differing_position(request.plain.token_ids, request.eagle.token_ids)
            if position is not None:
                found.append(
                    Difference(record.set, record.prompt_id, request, position, dtype, drafter, concurrency)
                )
    return found


def token_gap(scores: Tensor, a: int, b: int) -> tuple[float, bool]:
    """How far the lower of two tokens is below the highest of scores [V], and whether they are the top two.

    The gap bounds the rounding error it takes for either to win, also where three or more are close.
    """
    low = torch.minimum(scores[a], scores[b])
    above = int((scores > low).sum())
    return float(scores.max() - low), above <= 1


@torch.inference_mode()
def float32_scores(target: Target, prefix: Sequence[int], params: SamplingParams) -> Tensor:
    """What the choice of the token after `prefix` maximises, in units of logits: fp32 [V].

    At temperature T the draw is argmax(logits / T + noise); times T, so that the same rounding error of the
    logits makes the same difference at every temperature.
    """
    ids = torch.tensor([list(prefix)], device=target.device)
    last = target.decoder(input_ids=ids, use_cache=False).last_hidden_state[:, -1]  # [1, h]
    scores = target.logits(last)[0].float()
    if params.temperature > 0:
        keys = SamplingTensors.of([params.draw_key], target.device)
        position = torch.tensor([len(prefix)], device=target.device)
        noise = gumbel_noise_vocab(keys.seed, keys.sample, position, scores.shape[-1])
        scores = scores + params.temperature * noise[0]
    return scores


def explain(target: Target, difference: Difference, params: SamplingParams, bound: float) -> Divergence:
    """Looks at the scores of a float32 target where two answers part."""
    a, b = difference.plain_token, difference.eagle_token
    gap, top_two = None, None
    if a is not None and b is not None:
        gap, top_two = token_gap(float32_scores(target, difference.prefix, params), a, b)
    return Divergence(
        set=difference.set,
        prompt_id=difference.prompt_id,
        turn=difference.request.turn,
        dtype=difference.dtype,
        position=difference.position,
        plain_token=a,
        eagle_token=b,
        gap=gap,
        top_two=top_two,
        cause=_cause(difference.dtype, gap, bound),
        drafter=difference.drafter,
        concurrency=difference.concurrency,
    )


def _cause(dtype: str, gap: float | None, bound: float) -> Cause:
    if gap is None:
        return "length"
    if dtype == FLOAT32:
        return "float32"
    return "near_tie" if gap < bound else "wide_gap"


def verdict(
    measured: Sequence[Measured],
    rechecked: Sequence[Measured],
    divergences: Iterable[Divergence],
    bound: float,
    *,
    dtype: str,
    swept: int = 0,
    swept_identical: int = 0,
) -> Lossless:
    """Counts it all up.

    Args:
        measured: the run itself, in `dtype`.
        rechecked: prompts answered in float32 besides; when `dtype` is float32 the run itself is the check.
        divergences: of all.
        swept, swept_identical: answers of a sweep, and those that are plain decoding's.
    """
    all_divergences = list(divergences)
    requests = sum(len(record.requests) for record in measured)
    exact = measured if dtype == FLOAT32 else rechecked
    exact = [record for record in exact if record.requests]
    return Lossless(
        requests=requests + swept,
        identical=requests - len(differences(measured, dtype)) + swept_identical,
        near_ties=sum(not divergence.fault for divergence in all_divergences),
        faults=sum(divergence.fault for divergence in all_divergences),
        near_tie_gap=bound,
        float32=Float32Check(
            prompts=len(exact), identical=sum(not differences([record], FLOAT32) for record in exact)
        ),
        divergences=all_divergences,
    )


def as_measured(measured: Sequence[Measured], rechecks: Sequence[Recheck]) -> list[Measured]:
    """The float32 answers under the names of the prompts they belong to."""
    return [
        measured[recheck.prompt].model_copy(update={"requests": recheck.requests, "skipped": 0})
        for recheck in rechecks
    ]


def _at(token_ids: Sequence[int], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None
