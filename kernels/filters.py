"""The filters of sampling as one number a node: the least tempered logit that may be drawn.

With x = logits / T, and p = softmax(x) over what is left at each stage:

    top-k   keeps x >= the k-th largest x
    top-p   keeps x >= the least x of the smallest set of largest x whose mass reaches top_p
    min-p   keeps x >= max x + log(min_p)

in this order; tokens that tie with the last one kept are kept, so each filter is a threshold and so are all
three together. A greedy node has none: filters cannot change its choice. NaN counts as -inf.

Cost: sorting, in torch. The kernel searches the threshold instead, two bits of the number a pass: V elements
are read 1 + 8 times a filter in bf16 (1 + 16 in fp32), all but the first time from the L2 cache. The CPU op
(`kernels/cpu/filter.h`) looks for it among the few tokens near the greatest.

Source: the order of vLLM and transformers; search by bits: radix selection (Knuth, TAOCP 3, 5.2.5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu import DTYPES, ops_loaded
from kernels.dispatch import use_triton


@dataclass(frozen=True)
class Filters:
    """What each sequence rules out.

    top_k: int64 [B], 0 for no filter.
    top_p: fp32 [B] in (0, 1], 1 for no filter.
    min_p: fp32 [B] in [0, 1], 0 for no filter.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def filter_floor(
    logits: Tensor, temperature: Tensor, filters: Filters, allowed: Tensor | None = None
) -> Tensor:
    """The least tempered logit that each node may draw.

    Args:
        logits: [B, N, V], any float dtype.
        temperature: fp32 [B], 0 for greedy.
        filters: of B sequences.
        allowed: int32 [B, N, ceil(V / 32)], see `allowed_tokens`; tokens not allowed do not exist.

    Returns:
        fp32 [B, N], -inf where nothing is ruled out.
    """
    if use_triton(logits):
        from kernels.filters_triton import filter_floor_triton

        return filter_floor_triton(logits, temperature, filters, allowed)
    if allowed is None and logits.device.type == "cpu" and logits.dtype in DTYPES and ops_loaded():
        return _floor_by_op(logits, temperature, filters)
    return filter_floor_torch(logits, temperature, filters, allowed)


def _floor_by_op(logits: Tensor, temperature: Tensor, filters: Filters) -> Tensor:
    """By the CPU op, bit for bit: rows that it leaves to rounding are searched here."""
    batch, nodes, _ = logits.shape
    rows = logits.flatten(0, 1)
    each = [t.repeat_interleave(nodes) for t in (filters.top_k, filters.top_p.float(), filters.min_p.float())]
    heat, (top_k, top_p, min_p) = temperature.repeat_interleave(nodes), each
    floor = torch.ops.eagle_cpu.filter_floor(rows, heat, top_k.long(), top_p, min_p.log())
    for row in floor.isnan().nonzero().flatten().tolist():
        one = slice(row, row + 1)
        left = Filters(top_k[one], top_p[one], min_p[one])
        floor[one] = filter_floor_torch(rows[one, None], heat[one], left)[0]
    return floor.view(batch, nodes)


def allowed_tokens(allowed: Tensor, vocab_size: int) -> Tensor:
    """bool [..., V] of int32 words [..., ceil(V / 32)]: bit v % 32 of word v // 32, as grammars pack it."""
    bits = (allowed.unsqueeze(-1) >> torch.arange(32, device=allowed.device)) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


def filter_floor_torch(
    logits: Tensor, temperature: Tensor, filters: Filters, allowed: Tensor | None = None
) -> Tensor:
    """`filter_floor` in torch."""
    vocab_size = logits.shape[-1]
    if allowed is not None:
        logits = logits.masked_fill(~allowed_tokens(allowed, vocab_size), -torch.inf)
    heat = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
    x = (logits.float() / heat).nan_to_num_(-torch.inf, torch.inf, -torch.inf)
    x = x.sort(-1, descending=True).values  # [B, N, V]
    top_k, top_p, min_p = (f[:, None, None] for f in (filters.top_k, filters.top_p, filters.min_p))
    k = torch.where((top_k == 0) | (top_k > vocab_size), vocab_size, top_k)
    floor = x.gather(-1, (k - 1).expand(*x.shape[:2], 1))  # the k-th largest
    mass = x.masked_fill(x < floor, -torch.inf).double().softmax(-1)
    before = mass.cumsum(-1) - mass
    kept = (before < top_p).sum(-1, keepdim=True).clamp(min=1)
    nucleus = torch.where(top_p < 1, x.gather(-1, kept - 1), -torch.inf)
    least = torch.where(min_p > 0, x[..., :1] + min_p.log(), -torch.inf)
    floor = torch.where(k < vocab_size, floor, -torch.inf)
    floor = torch.maximum(torch.maximum(floor, nucleus), least).squeeze(-1)
    return torch.where(temperature[:, None] > 0, floor, -torch.inf)
