"""Log-probabilities of output tokens, of the target's own distribution: before temperature, filters and
penalties, as vLLM gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

_SPARE = 8
"""Tokens looked at beyond those asked for, so that of equals the lower ids are told."""


@dataclass(frozen=True)
class TokenLogprobs:
    """An output token's natural log-probability; ``top``: the most probable ids at its place and theirs, best
    first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Of R tokens drawn from the rows of logits [R, V]; row r, one at least, tells its ``tops[r]`` most
    probable ids."""
    scores = logits.float().log_softmax(-1)
    most = max(tops)
    best = scores.topk(min(most + _SPARE, scores.shape[-1]) if most else 0, dim=-1)
    own = scores[range(len(tokens)), list(tokens)].tolist()
    ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(mine, tuple(sorted(zip(ids, values, strict=True), key=_order)[:top]))
        for mine, (ids, values), top in zip(own, ranked, tops, strict=True)
    ]


def _order(entry: tuple[int, float]) -> tuple[float, int]:
    token, score = entry
    return -score, token
