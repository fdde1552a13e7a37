"""How a request is sampled: its parameters, and what they make of the target's logits at every node of a
tree.

In the order of vLLM and transformers:

    token mask -> logit bias -> penalties -> temperature -> top-k -> top-p -> min-p

Temperature and filters are applied where the token is drawn (`kernels.accept`). Mask, bias and penalties hold
at temperature 0 too; filters cannot change a greedy choice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import Filters
from stages.decoding.tree import DraftTree
from stages.errors import EagleError

TokenMask = Callable[[Sequence[int]], Tensor]
"""A grammar: from the output so far, drafted tokens of the node's path included, to bool [V], the tokens that
may follow. It must depend on nothing else, or drafting would change the text."""


class DrawKey(NamedTuple):
    """What a draw depends on besides logits and position; see `SamplingParams`."""

    temperature: float
    seed: int
    sample: int
    top_k: int
    top_p: float
    min_p: float

    @property
    def filters(self) -> bool:
        """Whether tokens are ruled out by their probability."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


GREEDY_BELOW = 1e-5
"""Temperatures; vLLM draws the line there too."""


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of decoding. The output is a function of prompt, these, and the target: nothing
    else.

    max_new_tokens: cap on the output, end of sequence included.
    temperature: 0 is greedy, and so is what is so small that logits over it have no place in a float.
    top_p, top_k, min_p: filters of the tempered distribution; 1.0, 0 and 0.0 switch them off. Tokens that
        tie with the last one kept are kept.
    repetition_penalty: divides positive logits of the tokens in prompt and output, multiplies negative ones.
    presence_penalty, frequency_penalty: subtracted from the logits of the tokens in the output, once, and
        once for each time.
    logit_bias: added to the logits of these token ids.
    token_mask: rules out tokens by what the output holds so far.
    seed, sample: key of the noise; ``sample`` tells apart several outputs of one request.
    stop_token_ids: end the output, besides the target's end of sequence.
    ignore_eos: go on past the target's end of sequence (benchmarks).
    logprobs: how many of the most probable tokens are told with each of the output; 0 is the output's own
        alone, None nothing.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    token_mask: TokenMask | None = None
    seed: int = 0
    sample: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "at least 1")
        _require(0.0 <= self.temperature < math.inf, "temperature", self.temperature, "0 or more")
        if self.temperature < GREEDY_BELOW:
            object.__setattr__(self, "temperature", 0.0)
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.top_k < 1 << 31, "top_k", self.top_k, "from 0 to 2,147,483,647")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "in [0, 1]")
        _require(
            0.0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "above 0"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2.0 <= getattr(self, name) <= 2.0, name, getattr(self, name), "in [-2, 2]")
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", self.logprobs, "0 or more")
        for token, bias in self.logit_bias.items():
            _require(
                token >= 0 and math.isfinite(bias), f"logit_bias of token {token}", bias, "a number for an id"
            )

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Ids that end the output, for a target with these end-of-sequence ids."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | eos_ids

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens before them."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before the temperature."""
        return self.penalises or bool(self.logit_bias) or self.token_mask is not None

    @cached_property
    def needs_logits(self) -> bool:
        """Whether more is asked of the target's logits than a token by temperature and filters."""
        return self.adjusts or self.logprobs is not None

    @cached_property
    def draw_key(self) -> DrawKey:
        return DrawKey(self.temperature, signed(self.seed), self.sample, self.top_k, self.top_p, self.min_p)


def _require(fine: bool, name: str, value: object, wanted: str) -> None:
    if not fine:
        raise EagleError(f"{name} must be {wanted}, not {value}")


@dataclass(frozen=True)
class SamplingTensors:
    """How each sequence of a batch draws, on the device: temperature fp32 [B], seed and sample int64 [B], and
    the filters, if any of them has one."""

    temperature: Tensor
    seed: Tensor
    sample: Tensor
    filters: Filters | None

    @classmethod
    def of(cls, keys: Sequence[DrawKey], device: torch.device) -> SamplingTensors:
        """Of B requests."""
        temperature, seed, sample, top_k, top_p, min_p = zip(*keys, strict=True)

        def whole(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def real(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        filtered = any(key.filters for key in keys)
        filters = Filters(whole(top_k), real(top_p), real(min_p)) if filtered else None
        return cls(real(temperature), whole(seed), whole(sample), filters)


def signed(seed: int) -> int:
    """Any Python integer as the int64 of its low 64 bits."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >= 1 << 63 else low


class TokenHistory:
    """The tokens of one sequence, as penalties and masks look at them; the root of the next tree is its
    last."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.output: list[int] = []
        self.counts: Counter[int] = Counter()  # of the output
        self._prompt = frozenset(prompt_ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens of the output."""
        self.output.extend(tokens)
        self.counts.update(tokens)

    def seen(self) -> list[int]:
        """The distinct ids of prompt and output."""
        return sorted(self._prompt | self.counts.keys())


def process_logits(
    logits: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[TokenHistory | None],
    trees: Sequence[DraftTree] | None = None,
) -> Tensor:
    """The logits from which each node's token is drawn, by those of its tokens that the filters keep.

    Args:
        logits: [B, N, V]; not changed.
        params: one a sequence.
        histories: one a sequence, up to its root; None will do where nothing adjusts logits.
        trees: what the N nodes are; nodes beyond a tree's own are padding. None: one node, the root.

    Returns:
        [B, N, V], -inf where a mask rules out; fp32 where anything was changed, else ``logits`` itself.

    Raises:
        EagleError: a token mask lets no token follow, or a bias is for an id that the target lacks.
    """
    if any(p.adjusts for p in params):
        logits = logits.to(torch.float32, copy=True)
        for b, (p, history) in enumerate(zip(params, histories, strict=True)):
            if p.adjusts:
                assert history is not None, "mask, bias and penalties need the tokens so far"
                paths = _paths(trees[b]) if trees is not None else [()]
                _adjust(logits[b, : len(paths)], p, history, paths)
    return logits


def _paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The drafted tokens from below the root down to each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def _adjust(
    logits: Tensor, params: SamplingParams, history: TokenHistory, paths: Sequence[tuple[int, ...]]
) -> None:
    """Apply mask, bias and penalties to logits fp32 [N, V] in place."""
    vocab = logits.shape[-1]
    if params.token_mask is not None:
        for row, path in zip(logits, paths, strict=True):
            allowed = params.token_mask([*history.output, *path])
            if not bool(allowed.any()):
                raise EagleError(
                    f"the token mask lets no token follow output token {len(history.output) + len(path)}; "
                    "a mask must at least let the end of sequence through"
                )
            row.masked_fill_(~allowed.to(row.device), float("-inf"))
    if params.logit_bias:
        ids = list(params.logit_bias)
        if max(ids) >= vocab:
            raise EagleError(f"logit_bias names token {max(ids)}; the target's ids end at {vocab - 1}")
        logits[:, ids] += logits.new_tensor([params.logit_bias[i] for i in ids])
    if params.penalises:
        _penalise(logits, params, history, paths)


def _penalise(
    logits: Tensor, params: SamplingParams, history: TokenHistory, paths: Sequence[tuple[int, ...]]
) -> None:
    # The tokens of a node's own path count for this node alone; they start from the logits as they were.
    own = [(i, t, n) for i, path in enumerate(paths) for t, n in Counter(path).items()]
    rows = torch.tensor([i for i, _, _ in own], dtype=torch.int64, device=logits.device)
    tokens = torch.tensor([t for _, t, _ in own], dtype=torch.int64, device=logits.device)
    counts = logits.new_tensor([history.counts[t] + n for _, t, n in own])
    before = logits[rows, tokens]
    seen = torch.tensor(history.seen(), dtype=torch.int64, device=logits.device)
    times = logits.new_tensor([history.counts[t] for t in history.seen()])
    logits[:, seen] = _penalised(logits[:, seen], times, params)
    logits[rows, tokens] = _penalised(before, counts, params)


def _penalised(values: Tensor, counts: Tensor, params: SamplingParams) -> Tensor:
    r = params.repetition_penalty
    values = torch.where(values > 0, values / r, values * r)
    return values - (params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
