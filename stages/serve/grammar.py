"""JSON schemas and the calls of tools as token masks: what may follow the output so far, by llguidance.

A mask is a function of the tokens on a node's path alone, as drafting needs it: the matcher goes back to what
two paths share and on from there.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from stages.serve.api_error import ApiError
from stages.serve.schema_trial import needs_trial, within_limits
from stages.serve.structure import Structure
from stages.serve.tool import Tool
from stages.serve.tool_form import ToolForm
from stages.serve.tool_grammar import ONE_LINE, calls_grammar, quoted
from stages.targets import Target

KEPT = 32
KEPT_TRIALS = 1024
REMEMBERED = 32
REASON_SHOWN = 200
# llguidance writes a counted list out, item by item, before it looks at its limits: seconds and gigabytes.
COUNTS = ("minItems", "maxItems")
MAX_COUNTED = 20_000
BUSY_S = 5


class Grammars:
    """Compiles grammars for one target's tokenizer, and keeps those of late.

    What has been compiled on one thread can be asked for on another.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # of those
        self._tried: OrderedDict[bytes, bool] = OrderedDict()  # by digest: schemas may be long

    def load(self) -> LLTokenizer:
        """The target's tokenizer, read once; where nobody else is using it.

        Raises:
            ApiError: it is none that grammars can be followed with.
        """
        if self._tokenizer is None:
            tokenizer = self._target.tokenizer
            size = max(self._target.vocab_size, len(tokenizer))
            try:
                self._tokenizer = from_tokenizer(tokenizer, size, sorted(self._target.eos_ids))
            except ValueError as error:
                reason = f"the tokenizer of {self._target.name} cannot be used ({error})"
                raise _refused(reason, "response_format") from None
        return self._tokenizer

    def of(self, structure: Structure) -> GrammarMask:
        """A mask that starts with no output.

        Raises:
            ApiError: the schema or pattern is none, or uses what is not supported.
        """
        if structure.pattern is not None:
            grammar = LLMatcher.grammar_from_regex(structure.pattern)
            return self._mask(grammar, structure.param, "pattern")
        if structure.options:
            grammar = "start: " + " | ".join(map(quoted, structure.options))
            return self._mask(grammar, structure.param, "choice")
        assert structure.schema is not None
        return self.mask(structure.schema, structure.param)

    def mask(self, schema: dict[str, Any], param: str = "response_format") -> GrammarMask:
        """The same for JSON of a schema."""
        self._try([schema], param)
        # On one line, as json.dumps writes: where spaces are free, a model may write them for ever.
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=ONE_LINE)
        except ValueError as error:
            raise _refused(str(error), param) from None
        return self._mask(grammar, param)

    def calls(self, form: ToolForm, tools: Sequence[Tool], *, must: bool, one: bool) -> GrammarMask:
        """The same for an answer that calls tools.

        Args:
            must: it is nothing but calls; otherwise text that may have calls in it, or be one.
            one: it has only one.

        Raises:
            ApiError: the schema of a tool is none, or uses what is not supported.
        """
        self._try([tool.function.schema_of_arguments for tool in tools], "tools")
        grammar = calls_grammar(form, tools, self._target.tokenizer, must=must, one=one)
        return self._mask(grammar, "tools")

    def _mask(self, grammar: str, param: str, what: str = "schema") -> GrammarMask:
        key = (grammar, param, what)
        with self._lock:
            matcher = self._kept.get(key)
        if matcher is None:
            matcher = self._compile(grammar, param, what)
        with self._lock:
            self._kept[key] = matcher
            self._kept.move_to_end(key)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        target = self._target
        return GrammarMask(
            matcher.deep_copy(), target.vocab_size, target.eos_ids, lambda reason: self._fault(key, reason)
        )

    def _fault(self, key: tuple[str, str, str], reason: str) -> ApiError:
        """Copies of a matcher share what one of them has found out, its end too: others begin anew."""
        with self._lock:
            self._kept.pop(key, None)
        _, param, what = key
        return _refused(f"{reason}; make it simpler", param, what)

    def _try(self, schemas: Sequence[Any], param: str) -> None:
        _refuse_large(schemas, param)
        if not needs_trial(schemas):
            return
        text = json.dumps(schemas)
        digest = sha256(text.encode()).digest()
        passed = self._tried.get(digest)
        if passed is None:
            try:
                passed = self._tried[digest] = within_limits(text)
            except (OSError, subprocess.TimeoutExpired):
                raise _busy() from None
            if len(self._tried) > KEPT_TRIALS:
                self._tried.popitem(last=False)
        if not passed:
            raise _refused("it takes too long, or too much memory; make it simpler", param)

    def _compile(self, grammar: str, param: str, what: str) -> LLMatcher:
        matcher = LLMatcher(self.load(), grammar, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error(), param, what)
        return matcher


def _refuse_large(schemas: Sequence[Any], param: str) -> None:
    """Raises ApiError: the lists of the schemas may be too long together."""
    counted: float = 0
    left = list(schemas)
    while left:
        node = left.pop()
        if isinstance(node, dict):
            counts = (node.get(name) for name in COUNTS)
            counted += max([0, *(n for n in counts if isinstance(n, int | float))])
            if counted > MAX_COUNTED:
                raise _refused(f"its lists may have more than {MAX_COUNTED} items; lower maxItems", param)
            left += node.values()
        elif isinstance(node, list):
            left += node


def _refused(reason: str, param: str, what: str = "schema") -> ApiError:
    message = f"the {what} cannot be followed: {' '.join(reason.split())[:REASON_SHOWN]}"
    return ApiError(400, message, param=param, code="invalid_value")


def _busy() -> ApiError:
    message = f"the server has no time to compile this schema now; try again in {BUSY_S} s"
    return ApiError(503, message, kind="server_error", code="server_busy", retry_after=BUSY_S)


class GrammarMask:
    """What may follow an output, as bool [V]. For one answer and one thread.

    Args:
        faulty: told the reason when the matcher fails; makes the error.

    Attributes:
        fault: why the answer can be followed no further, if it cannot: the matcher has limits of its own,
            which some grammars meet only while they are followed. The answer then ends at once.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        eos_ids: frozenset[int],
        faulty: Callable[[str], ApiError],
    ) -> None:
        self.fault: ApiError | None = None
        self._faulty = faulty
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._path: list[int] = []  # what the matcher has taken
        self._made: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def __call__(self, output: Sequence[int]) -> Tensor:
        """A drafted node is asked for twice: when it is drafted, and when it is verified."""
        wanted = tuple(output)
        if wanted not in self._made:
            self._made[wanted] = self._make(list(wanted))
            if len(self._made) > REMEMBERED:
                self._made.popitem(last=False)
        return self._made[wanted]

    def _make(self, wanted: list[int]) -> Tensor:
        if self.fault is not None:
            return self._end()
        if self._follow(wanted):
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(bool)
            if allowed.any() and not self._matcher.is_error():
                return torch.from_numpy(allowed)
        elif not self._matcher.is_error():
            # A draft that the grammar forbids: its parent never draws it, so nothing depends on this.
            return torch.ones(self._vocab_size, dtype=torch.bool)
        reason = self._matcher.get_error().partition("\n")[0]
        self.fault = self._faulty(reason or "no token of this model may follow")
        return self._end()

    def _end(self) -> Tensor:
        allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
        allowed[sorted(self._eos_ids)] = True
        return allowed

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
