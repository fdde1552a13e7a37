"""Triton kernel of `kernels.filters`: the formulas and their cost are there.

One program a node. An fp32 number maps to an integer of the same order, its key; the threshold's key is found
from the top, two bits a pass, by counting (top-k) or summing the mass of (top-p) the tokens at or above three
candidates. Numbers that were bf16 or fp16 have keys whose low bits are all alike, so those are dropped and
the search is shorter. Sums run in one fixed order, so a node's threshold does not depend on the nodes beside
it."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.filters import Filters

_BLOCK = 2048
# Bits of an fp32 number that its origin can set: a sign, 8 of exponent and the mantissa, made even.
_KEY_BITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}


@triton.jit
def masked_logits(logits_ptr, allowed_ptr, start, vocab_size, ALLOWED: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 logits of the tokens `start` to `start + BLOCK - 1`; -inf beyond the vocabulary, where the words
    of `allowed` rule them out, and in place of NaN."""
    token = start + tl.arange(0, BLOCK)
    inside = token < vocab_size
    logits = tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    if ALLOWED:
        word = tl.load(allowed_ptr + token // 32, mask=inside, other=0)
        logits = tl.where(((word >> (token % 32)) & 1) != 0, logits, float("-inf"))
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def _key_of(values, BITS: tl.constexpr):
    """The upper BITS bits of fp32 values as uint32 of the same order."""
    bits = (values + 0.0).to(tl.uint32, bitcast=True)  # + 0.0: one zero only
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000) >> (32 - BITS)


@triton.jit
def _value_of(key, BITS: tl.constexpr):
    """The fp32 value of a key whose dropped bits were zeros."""
    full = key << (32 - BITS)
    turned = (full ^ 0xFFFFFFFF) & (0xFFFFFFFF << (32 - BITS) & 0xFFFFFFFF)
    return tl.where(full >= 0x80000000, full ^ 0x80000000, turned).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    logits_ptr,
    allowed_ptr,
    vocab_size,
    wanted,
    least,
    peak,
    rate,
    MASS: tl.constexpr,
    ALLOWED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest key such that the tokens at or above it are `wanted` in number, or if MASS weigh the share
    `wanted` of all; tokens whose key is below `least` do not count."""
    if MASS:
        mass = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            logits = masked_logits(logits_ptr, allowed_ptr, start, vocab_size, ALLOWED, BLOCK)
            mass += tl.where(_key_of(logits, BITS) >= least, tl.exp2((logits - peak) * rate), 0.0)
        wanted *= tl.sum(mass, axis=0)
    found = least ^ least
    unit = found | (1 << (BITS - 2))
    for _ in range(BITS // 2):
        first, second = found | unit, found | (unit << 1)
        third = first | second
        above_first = tl.zeros([BLOCK], tl.float32)
        above_second = tl.zeros([BLOCK], tl.float32)
        above_third = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            logits = masked_logits(logits_ptr, allowed_ptr, start, vocab_size, ALLOWED, BLOCK)
            key = _key_of(logits, BITS)
            weight = tl.where((key >= least) & (start + tl.arange(0, BLOCK) < vocab_size), 1.0, 0.0)
            if MASS:
                weight *= tl.exp2((logits - peak) * rate)
            above_first += tl.where(key >= first, weight, 0.0)
            above_second += tl.where(key >= second, weight, 0.0)
            above_third += tl.where(key >= third, weight, 0.0)
        found = tl.where(tl.sum(above_first, axis=0) >= wanted, first, found)
        found = tl.where(tl.sum(above_second, axis=0) >= wanted, second, found)
        found = tl.where(tl.sum(above_third, axis=0) >= wanted, third, found)
        unit = unit >> 2
    return found


@triton.jit
def _floor_kernel(
    logits_ptr,
    logits_stride_batch,
    logits_stride_node,
    allowed_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    floor_ptr,
    nodes,
    vocab_size,
    ALLOWED: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (B * N,)."""
    row = tl.program_id(0).to(tl.int64)
    sequence = row // nodes
    logits_ptr += sequence * logits_stride_batch + (row % nodes) * logits_stride_node
    allowed_ptr += row * tl.cdiv(vocab_size, 32)
    temperature = tl.load(temperature_ptr + sequence)
    top_k = tl.load(top_k_ptr + sequence).to(tl.int32)
    top_p = tl.load(top_p_ptr + sequence)
    min_p = tl.load(min_p_ptr + sequence)
    floor = temperature * 0.0 - float("inf")
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            logits = masked_logits(logits_ptr, allowed_ptr, start, vocab_size, ALLOWED, BLOCK)
            largest = tl.maximum(largest, logits)
        peak = tl.max(largest, axis=0)
        rate = 1.4426950408889634 / temperature
        key = tl.full([], 0, tl.uint32)
        if (top_k > 0) & (top_k < vocab_size):
            key = _search(
                logits_ptr, allowed_ptr, vocab_size, top_k.to(tl.float32), key, peak, rate,
                False, ALLOWED, BITS, BLOCK,
            )  # fmt: skip
        if top_p < 1.0:
            nucleus = _search(
                logits_ptr, allowed_ptr, vocab_size, top_p, key, peak, rate, True, ALLOWED, BITS, BLOCK
            )
            key = tl.maximum(key, nucleus)
        least = tl.div_rn(_value_of(key, BITS), temperature)
        floor = tl.where(key == 0, float("-inf"), least)
        if min_p > 0.0:
            floor = tl.maximum(floor, tl.div_rn(peak, temperature) + tl.log(min_p))
    tl.store(floor_ptr + row, floor)


def filter_floor_triton(
    logits: Tensor, temperature: Tensor, filters: Filters, allowed: Tensor | None = None
) -> Tensor:
    """`kernels.filters.filter_floor`."""
    batch, nodes, vocab_size = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    floor = torch.empty(batch, nodes, dtype=torch.float32, device=logits.device)
    _floor_kernel[(batch * nodes,)](
        logits,
        logits.stride(0),
        logits.stride(1),
        logits if allowed is None else allowed.contiguous(),
        *(t.contiguous() for t in (temperature, filters.top_k, filters.top_p, filters.min_p)),
        floor,
        nodes,
        vocab_size,
        ALLOWED=allowed is not None,
        BITS=_KEY_BITS[logits.dtype],
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return floor
