"""Gumbel noise keyed by position: a pure function of (seed, sample, position, token).

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) is a counter-based
generator: the counter names the draw, so noise needs no state and any worker can recompute any part of it.
Here

    counter = (token >> 2, position, sample, 0)    key = (low, high 32 bits of seed)    word = token & 3

so one Philox call serves four neighbouring tokens. A word becomes a standard Gumbel variable by

    v = min((word + 1/2) / 2^32, 1 - 2^-24)    E = -log1p(-v)    G = -log(E)

all in fp32. E is a standard exponential; a large G comes from a small v, where fp32 is dense and log1p exact
to the last bits, so the upper tail (the one that decides an argmax) is right and neither end is infinite:
-2.82 < G < 22.88.

Cost: 10 rounds of two 32x32 -> 64 bit products for four tokens; nothing is read, 4 bytes a token are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import use_triton

PHILOX_M0 = 0xD2511F53
PHILOX_M1 = 0xCD9E8D57
PHILOX_W0 = 0x9E3779B9
PHILOX_W1 = 0xBB67AE85
PHILOX_ROUNDS = 10

BELOW_ONE = 1.0 - 2.0**-24
# Bounds of G, rounded outwards: E = v = 2^-33 to the last bit at one end, E = 24 log 2 at the other.
GUMBEL_MIN = -2.82
GUMBEL_MAX = 22.88

_MASK = 0xFFFFFFFF


def philox4x32(
    counter0: Tensor,
    counter1: Tensor,
    counter2: Tensor,
    counter3: Tensor,
    key0: Tensor | int,
    key1: Tensor | int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32.

    Args:
        counter0: int64 [...] holding uint32 values, like the other three; all broadcast together, none is
            modified.
        key0: int64 tensor that broadcasts with the counters, or a number, holding a uint32; key1 likewise.

    Returns:
        Four int64 tensors of the broadcast shape, each holding uniform uint32 values.

    Source: Salmon et al., SC 2011, section 3.3 and table 2.
    """
    x0, x1, x2, x3 = torch.broadcast_tensors(counter0, counter1, counter2, counter3)
    for _ in range(PHILOX_ROUNDS):
        # int64 products wrap modulo 2^64, which keeps exactly the bits wanted; only multiplicands need
        # masking, so the low halves travel with garbage above bit 31 until they are xored into one.
        p0 = x0 * PHILOX_M0
        p1 = x2 * PHILOX_M1
        x0 = (p1 >> 32).bitwise_xor_(x1).bitwise_xor_(key0).bitwise_and_(_MASK)
        x2 = (p0 >> 32).bitwise_xor_(x3).bitwise_xor_(key1).bitwise_and_(_MASK)
        x1, x3 = p1, p0
        key0 = (key0 + PHILOX_W0) & _MASK
        key1 = (key1 + PHILOX_W1) & _MASK
    return x0, x1 & _MASK, x2, x3 & _MASK


def uniform_from_word(word: Tensor) -> Tensor:
    """Numbers in (0, 1), in place of uint32 words that were rounded to fp32."""
    return word.add_(0.5).mul_(2.0**-32).clamp_(max=BELOW_ONE)


def gumbel_from_word(word: Tensor) -> Tensor:
    """Standard Gumbel variables, likewise."""
    return uniform_from_word(word).neg_().log1p_().neg_().log_().neg_()


def _keys(seed: Tensor) -> tuple[Tensor, Tensor]:
    return seed & _MASK, (seed >> 32) & _MASK


def gumbel_noise(seed: Tensor, sample: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Noise of the given tokens.

    Args:
        seed: int64 [...], the request's seed.
        sample: int64 [...], which of the request's samples.
        position: int64 [...], absolute position of the token that is drawn.
        token: int64 [..., K], token ids. The leading dimensions of all four broadcast.

    Returns:
        fp32 [..., K].
    """
    if use_triton(token):
        from kernels.noise_triton import gumbel_noise_triton

        return gumbel_noise_triton(seed, sample, position, token)
    return gumbel_noise_torch(seed, sample, position, token)


def noise_words(seed: Tensor, sample: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """The word of each of the given tokens: int64 [..., K] holding uint32 values, by the arguments of
    `gumbel_noise`."""
    seed, sample, position = (t.unsqueeze(-1) for t in (seed, sample, position))
    words = philox4x32(token >> 2, position & _MASK, sample & _MASK, torch.zeros_like(token), *_keys(seed))
    low, high = (token & 1).bool(), (token & 2).bool()
    return torch.where(high, torch.where(low, words[3], words[2]), torch.where(low, words[1], words[0]))


def gumbel_noise_torch(seed: Tensor, sample: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """`gumbel_noise` in torch."""
    return gumbel_from_word(noise_words(seed, sample, position, token).to(torch.float32))


def gumbel_noise_vocab(seed: Tensor, sample: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Noise of every token: equal bit for bit to `gumbel_noise` of `arange(vocab_size)`, one Philox call a
    four tokens.

    Args:
        seed: int64 [...]; sample and position likewise; they broadcast.

    Returns:
        fp32 [..., vocab_size].
    """
    if use_triton(seed):
        from kernels.noise_triton import gumbel_noise_vocab_triton

        return gumbel_noise_vocab_triton(seed, sample, position, vocab_size)
    return gumbel_noise_vocab_torch(seed, sample, position, vocab_size)


def gumbel_noise_vocab_torch(seed: Tensor, sample: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """`gumbel_noise_vocab` in torch."""
    seed, sample, position = torch.broadcast_tensors(seed, sample, position)
    shape = seed.shape
    seed, sample, position = (t.reshape(-1, 1) for t in (seed, sample, position))
    counters = torch.arange(-(-vocab_size // 4), device=seed.device).unsqueeze(0)
    noise = torch.empty(seed.shape[0], counters.shape[1], 4, dtype=torch.float32, device=seed.device)
    if torch.compiler.is_compiling() or seed.device.type != "cpu":
        _fill(noise, counters, position, sample, *_keys(seed))
    else:
        # A row's buffers fit a core's L2 cache, and keys that are numbers cost no tensor operations.
        for row, value in enumerate(seed.flatten().tolist()):
            one = slice(row, row + 1)
            _fill(noise[one], counters, position[one], sample[one], value & _MASK, (value >> 32) & _MASK)
    return gumbel_from_word(noise.flatten(1))[:, :vocab_size].reshape(*shape, vocab_size)


def _fill(
    noise: Tensor, counters: Tensor, position: Tensor, sample: Tensor, key0: Tensor | int, key1: Tensor | int
) -> None:
    """Write the words of `counters` [1, C] for R rows into `noise` [R, C, 4], rounded to fp32."""
    zero = torch.zeros_like(position)
    words = philox4x32(counters, position & _MASK, sample & _MASK, zero, key0, key1)
    for lane, word in enumerate(words):
        noise[..., lane].copy_(word)
