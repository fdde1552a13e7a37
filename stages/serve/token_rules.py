"""Tokens that a request rules out by itself, without a grammar: as a mask, so that drafting goes on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor


class TokenRules:
    """What may follow an output, as bool [V]: a function of its tokens alone.

    Args:
        end_ids: tokens that end the answer; what follows where nothing else may.
        allowed: the only tokens there are; all by default.
        words: token ids of words; the last of a word's may not follow its others.
        min_tokens: the answer does not end before it has as many.
    """

    def __init__(
        self,
        vocab_size: int,
        end_ids: Collection[int],
        *,
        allowed: Collection[int] | None = None,
        words: Sequence[Sequence[int]] = (),
        min_tokens: int = 0,
    ) -> None:
        self._base = torch.full((vocab_size,), allowed is None)
        if allowed is not None:
            self._base[sorted(set(allowed))] = True
        self._ends = sorted(i for i in end_ids if i < vocab_size)
        self._words = tuple(tuple(word) for word in words if max(word) < vocab_size)
        self._min_tokens = min_tokens

    def __call__(self, output: Sequence[int]) -> Tensor:
        mask = self._base.clone()
        if len(output) < self._min_tokens:
            mask[self._ends] = False
        for *before, last in self._words:
            if list(output[len(output) - len(before) :]) == before:
                mask[last] = False
        if not mask.any():
            mask[self._ends or self._base.nonzero()[:, 0].tolist()] = True
        return mask
