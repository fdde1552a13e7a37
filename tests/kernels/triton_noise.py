"""Claims about the noise of the Triton kernels, word for word; run as `triton_ops.py` is."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import gumbel_noise, gumbel_noise_vocab
from kernels.noise import noise_words as noise_words_torch
from kernels.noise import uniform_from_word as uniform_from_word_torch
from kernels.noise_triton import (
    gumbel_from_word,
    gumbel_noise_triton,
    gumbel_noise_vocab_triton,
    in_order_of_tokens,
    noise_words,
    uniform_from_word,
    word_of_token,
)
from tests.kernels.known_answers import KNOWN_ANSWERS, LOGARITHMS, words_to_try
from tests.kernels.triton_ops import DEVICE, quick


@triton.jit
def _philox_kernel(counter_ptr, seed_ptr, out_ptr):
    place = tl.arange(0, 4)
    counter = tl.load(counter_ptr + place)
    zero = tl.zeros([4], tl.uint32)
    c0 = zero + tl.sum(tl.where(place == 0, counter, 0), axis=0).to(tl.uint32)
    c1 = zero + tl.sum(tl.where(place == 1, counter, 0), axis=0).to(tl.uint32)
    c2 = zero + tl.sum(tl.where(place == 2, counter, 0), axis=0).to(tl.uint32)
    c3 = zero + tl.sum(tl.where(place == 3, counter, 0), axis=0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), c0, c1, c2, c3)
    tl.store(out_ptr + place, word_of_token(w0, w1, w2, w3, place).to(tl.int64))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    seed = torch.tensor([key[0] + (key[1] << 32)], dtype=torch.uint64).view(torch.int64)
    words = torch.empty(4, dtype=torch.int64, device=DEVICE)
    _philox_kernel[(1,)](torch.tensor(counter, device=DEVICE), seed.to(DEVICE), words)
    assert words.tolist() == expected


@triton.jit
def _words_kernel(
    seed_ptr,
    sample_ptr,
    position_ptr,
    token_ptr,
    some_ptr,
    tile_ptr,
    TOKENS: tl.constexpr,
    CALLS: tl.constexpr,
):
    seed, sample, position = tl.load(seed_ptr), tl.load(sample_ptr), tl.load(position_ptr)
    place = tl.arange(0, TOKENS)
    token = tl.load(token_ptr + place)
    w0, w1, w2, w3 = noise_words(seed, sample, position, token >> 2)
    tl.store(some_ptr + place, word_of_token(w0, w1, w2, w3, token).to(tl.int64))
    w0, w1, w2, w3 = noise_words(seed, sample, position, tl.arange(0, CALLS))
    tl.store(tile_ptr + tl.arange(0, 4 * CALLS), in_order_of_tokens(w0, w1, w2, w3).to(tl.int64))


# Positions behind 2^31 and 2^32 too: a key is taken by its low 32 bits.
keys_of_noise = st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**34))


@settings(quick, max_examples=100)
@given(keys_of_noise, st.lists(st.integers(0, 300_000) | st.integers(0, 2**31 - 1), min_size=8, max_size=8))
def test_words_are_torch_s_bit_for_bit(key, tokens):
    keys, token = [torch.tensor([x]) for x in key], torch.tensor(tokens)
    some, tile = (torch.empty(n, dtype=torch.int64, device=DEVICE) for n in (8, 64))
    _words_kernel[(1,)](*(t.to(DEVICE) for t in (*keys, token)), some, tile, TOKENS=8, CALLS=16)
    assert torch.equal(some.cpu(), noise_words_torch(*keys, token[None])[0])
    assert torch.equal(tile.cpu(), noise_words_torch(*keys, torch.arange(64)[None])[0])


@settings(quick, max_examples=4)
@given(keys_of_noise)
def test_noise_equals_the_reference_to_rounding(key):
    keys = [torch.tensor([x, x + 1 if x < 2**62 else 0]) for x in key]
    token = torch.tensor([[0, 1, 2, 3, 1023, 1024, 49151], [5, 4, 3, 2, 1, 0, 200_000]])
    device_keys = [k.to(DEVICE) for k in keys]
    some = gumbel_noise_triton(*device_keys, token.to(DEVICE)).cpu()
    torch.testing.assert_close(some, gumbel_noise(*keys, token), rtol=1e-6, atol=1e-6)
    whole = gumbel_noise_vocab_triton(*device_keys, 2051).cpu()
    torch.testing.assert_close(whole, gumbel_noise_vocab(*keys, 2051), rtol=1e-6, atol=1e-6)
    column = token[:1, :6]
    one = [k[:1] for k in device_keys]
    assert torch.equal(gumbel_noise_triton(*one, column.to(DEVICE)).cpu(), whole[:1].gather(1, column))


@triton.jit
def _gumbel_kernel(word_ptr, uniform_ptr, out_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(word_ptr + place, mask=place < count, other=0).to(tl.uint32)
    tl.store(uniform_ptr + place, uniform_from_word(word), mask=place < count)
    tl.store(out_ptr + place, gumbel_from_word(word), mask=place < count)


def test_words_become_torch_s_numbers_and_noise_that_is_exact_in_both_tails():
    words = words_to_try()
    uniform, noise = torch.empty(2, len(words), device=DEVICE)
    _gumbel_kernel[(-(-len(words) // 1024),)](words.to(DEVICE), uniform, noise, len(words), BLOCK=1024)
    expected = uniform_from_word_torch(words.float())
    assert torch.equal(uniform.cpu(), expected)
    exact = -torch.log(-torch.log1p(-expected.double()))
    # Kahan's log1p rounds twice more than a logarithm.
    assert torch.all((noise.cpu().double() - exact).abs() <= 2 * LOGARITHMS * exact.abs().clamp(min=1))
