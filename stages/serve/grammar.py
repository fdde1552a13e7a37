"""JSON schemas as token masks: what may follow the output so far, by llguidance.

A mask is a function of the tokens on a node's path alone, as drafting needs it: the matcher goes back to what
two paths share and on from there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from stages.serve.api_error import ApiError
from stages.targets import Target

KEPT = 32
REASON_SHOWN = 200


class Grammars:
    """Compiles schemas for one target's tokenizer. Used by one thread at a time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(KEPT)(self._compile)

    def mask(self, schema: dict[str, Any]) -> GrammarMask:
        """A mask that starts with no output.

        Raises:
            ApiError: the schema is none, or uses what is not supported.
        """
        matcher = self._compiled(json.dumps(schema))
        return GrammarMask(matcher.deep_copy(), self._target.vocab_size, self._target.eos_ids)

    def _compile(self, schema: str) -> LLMatcher:
        if self._tokenizer is None:
            tokenizer = self._target.tokenizer
            size = max(self._target.vocab_size, len(tokenizer))
            try:
                self._tokenizer = from_tokenizer(tokenizer, size, sorted(self._target.eos_ids))
            except ValueError as error:
                raise _refused(f"the tokenizer of {self._target.name} cannot be used ({error})") from None
        try:
            # On one line, as json.dumps writes: where spaces are free, a model may write them for ever.
            grammar = LLMatcher.grammar_from_json_schema(
                schema,
                overrides={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
            )
        except ValueError as error:
            raise _refused(str(error)) from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return matcher


def _refused(reason: str) -> ApiError:
    message = f"the schema cannot be followed: {' '.join(reason.split())[:REASON_SHOWN]}"
    return ApiError(400, message, param="response_format", code="invalid_value")


class GrammarMask:
    """What may follow an output, as bool [V]. For one answer and one thread."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._path: list[int] = []  # what the matcher has taken

    def __call__(self, output: Sequence[int]) -> Tensor:
        wanted = list(output)
        if not self._follow(wanted):
            # A draft that the grammar forbids: its parent never draws it, so nothing depends on this.
            return torch.ones(self._vocab_size, dtype=torch.bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
        if not allowed.any():  # the matcher has given up, for a schema beyond its limits
            allowed[sorted(self._eos_ids)] = True
        return torch.from_numpy(allowed)

    def _follow(self, wanted: list[int]) -> bool:
        """Bring the matcher to an output; false where it does not get there."""
        shared = 0
        if wanted[: len(self._path)] == self._path:
            shared = len(self._path)
        else:
            while wanted[shared : shared + 1] == self._path[shared : shared + 1]:
                shared += 1
            self._matcher.rollback(len(self._path) - shared)
        taken = self._matcher.try_consume_tokens(wanted[shared:])
        self._path = wanted[: shared + taken]
        return len(self._path) == len(wanted) and not (wanted and wanted[-1] in self._eos_ids)
