"""Triton kernels of `kernels.noise`: the formula, its source and its cost are there.

The exponential uses Kahan's log1p, `log(1 - v) * v / (1 - (1 - v))`, which keeps the relative precision of
-log1p(-v) for small v with a plain logarithm: 1 - (1 - v) is the v that the logarithm saw. The words equal
torch's bit for bit; the noise may differ from torch's in the last bits, as two logarithms do.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def uniform_from_word(word):
    """The fp32 numbers in (0, 1) that uint32 words stand for."""
    return tl.minimum((word.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 0.99999994)


@triton.jit
def gumbel_from_word(word):
    """Standard Gumbel variables, fp32, from uint32 words."""
    v = uniform_from_word(word)
    u = 1.0 - v
    seen = 1.0 - u
    # v itself where 1 - v rounds to 1; the divisor is replaced there to keep 0 / 0 out.
    exponential = tl.where(seen == 0.0, v, -tl.log(u) * (v / tl.where(seen == 0.0, 1.0, seen)))
    return -tl.log(exponential)


@triton.jit
def noise_words(seed, sample, position, counter):
    """Words of the tokens 4 c, 4 c + 1, 4 c + 2, 4 c + 3 of counters c: four uint32 blocks of their shape.

    Keys are int64 scalars, or blocks that broadcast with the counters; the seed's is a scalar or whole.
    """
    zero = tl.zeros_like(counter).to(tl.uint32)
    return tl.philox(
        seed, counter.to(tl.uint32), zero + position.to(tl.uint32), zero + sample.to(tl.uint32), zero
    )


@triton.jit
def in_order_of_tokens(w0, w1, w2, w3):
    """The words [..., C] of C counters as one block [..., 4 C]."""
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def gumbel_tile(seed, sample, position, first_call, CALLS: tl.constexpr):
    """Noise of the tokens 4 * first_call .. 4 * (first_call + CALLS) - 1: fp32 [4 * CALLS].

    seed, sample, position are int64 scalars, first_call an integer scalar.
    """
    w0, w1, w2, w3 = noise_words(seed, sample, position, first_call + tl.arange(0, CALLS))
    return gumbel_from_word(in_order_of_tokens(w0, w1, w2, w3))


@triton.jit
def gumbel_rows(seed, sample, position, first_call, ROWS: tl.constexpr, CALLS: tl.constexpr):
    """`gumbel_tile` of several rows: fp32 [ROWS, 4 * CALLS] of int64 [ROWS] keys."""
    counter = tl.zeros([ROWS, CALLS], tl.int32) + (first_call + tl.arange(0, CALLS))[None, :]
    seed = tl.zeros([ROWS, CALLS], tl.int64) + seed[:, None]
    w0, w1, w2, w3 = noise_words(seed, sample[:, None], position[:, None], counter)
    return gumbel_from_word(in_order_of_tokens(w0, w1, w2, w3))


@triton.jit
def word_of_token(w0, w1, w2, w3, token):
    """Each token's word among the four of its counter."""
    low, high = (token & 1) != 0, (token & 2) != 0
    return tl.where(high, tl.where(low, w3, w2), tl.where(low, w1, w0))


@triton.jit
def gumbel_tokens(seed, sample, position, token):
    """Noise of any tokens: fp32 [BLOCK] of scalar keys and int64 token ids [BLOCK]."""
    w0, w1, w2, w3 = noise_words(seed, sample, position, token >> 2)
    return gumbel_from_word(word_of_token(w0, w1, w2, w3, token))


@triton.jit
def _token_kernel(seed_ptr, sample_ptr, position_ptr, token_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """Grid (rows, blocks of tokens)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(token_ptr + row * width + column, mask=inside, other=0)
    noise = gumbel_tokens(
        tl.load(seed_ptr + row), tl.load(sample_ptr + row), tl.load(position_ptr + row), token
    )
    tl.store(out_ptr + row * width + column, noise, mask=inside)


@triton.jit
def _vocab_kernel(seed_ptr, sample_ptr, position_ptr, out_ptr, vocab_size, BLOCK: tl.constexpr):
    """Grid (rows, blocks of tokens)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    noise = gumbel_tile(
        tl.load(seed_ptr + row),
        tl.load(sample_ptr + row),
        tl.load(position_ptr + row),
        block * (BLOCK // 4),
        BLOCK // 4,
    )
    token = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + row * vocab_size + token, noise, mask=token < vocab_size)


def gumbel_noise_triton(seed: Tensor, sample: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """`kernels.noise.gumbel_noise`."""
    lead = torch.broadcast_shapes(seed.shape, sample.shape, position.shape, token.shape[:-1])
    width = token.shape[-1]
    token = token.expand(*lead, width).contiguous()
    seed, sample, position = (t.expand(lead).contiguous() for t in (seed, sample, position))
    out = torch.empty(token.shape, dtype=torch.float32, device=token.device)
    if out.numel():
        block = min(_BLOCK, max(16, triton.next_power_of_2(width)))
        grid = (seed.numel(), triton.cdiv(width, block))
        _token_kernel[grid](seed, sample, position, token, out, width, BLOCK=block)
    return out


def gumbel_noise_vocab_triton(seed: Tensor, sample: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """`kernels.noise.gumbel_noise_vocab`."""
    seed, sample, position = (t.contiguous() for t in torch.broadcast_tensors(seed, sample, position))
    out = torch.empty(*seed.shape, vocab_size, dtype=torch.float32, device=seed.device)
    if out.numel():
        grid = (seed.numel(), triton.cdiv(vocab_size, _BLOCK))
        _vocab_kernel[grid](seed, sample, position, out, vocab_size, BLOCK=_BLOCK)
    return out
