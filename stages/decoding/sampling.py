"""How a request is sampled, and the filters of its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of decoding. The output is a function of prompt, these, and the target: nothing
    else.

    max_new_tokens: cap on the output, end of sequence included.
    temperature: 0 is greedy.
    top_p, top_k: nucleus and top-k filters; 1.0 and 0 switch them off.
    seed, sample: key of the noise; ``sample`` tells apart several outputs of one request.
    stop_token_ids: end the output, besides the target's end of sequence.
    ignore_eos: go on past the target's end of sequence (benchmarks).
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    sample: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 or more, not {self.top_k}")

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Ids that end the output, for a target with these end-of-sequence ids."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | eos_ids


@dataclass(frozen=True)
class SamplingTensors:
    """The noise keys of a batch on the device: temperature fp32 [B], seed and sample int64 [B]."""

    temperature: Tensor
    seed: Tensor
    sample: Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> SamplingTensors:
        return cls(
            torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            torch.tensor([_signed(p.seed) for p in params], dtype=torch.int64, device=device),
            torch.tensor([p.sample for p in params], dtype=torch.int64, device=device),
        )


def _signed(seed: int) -> int:
    """Any Python integer as the int64 of its low 64 bits."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >= 1 << 63 else low


def filter_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Rule out tokens by top-k, then top-p, in the order of transformers and vLLM: temperature, top-k, top-p.

    Temperature does not change what top-k keeps; top-p is taken of the tempered distribution.

    Args:
        logits: [B, N, V]; not changed.
        params: one a sequence; greedy sequences and those without filters pass through.

    Returns:
        [B, N, V], -inf where ruled out; fp32 where anything was filtered.
    """
    if all(p.temperature == 0 or (p.top_k == 0 and p.top_p == 1.0) for p in params):
        return logits
    filtered = logits.float().clone()
    for row, p in zip(filtered, params, strict=True):
        if p.temperature == 0:
            continue
        if 0 < p.top_k < row.shape[-1]:
            kth = row.topk(p.top_k, dim=-1).values[:, -1:]
            row.masked_fill_(row < kth, float("-inf"))
        if p.top_p < 1.0:
            ordered, order = row.sort(dim=-1, descending=True, stable=True)
            probabilities = (ordered / p.temperature).softmax(-1)
            # Keep the smallest set whose mass reaches top_p: a token goes when those above it already have
            # it.
            beyond = probabilities.cumsum(-1) - probabilities >= p.top_p
            row.masked_fill_(torch.zeros_like(beyond).scatter_(1, order, beyond), float("-inf"))
    return filtered
