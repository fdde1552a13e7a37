from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import GUMBEL_MAX, GUMBEL_MIN, gumbel_noise, gumbel_noise_vocab, philox4x32
from kernels.noise import gumbel_from_word
from tests.kernels.known_answers import KNOWN_ANSWERS, LOGARITHMS, words_to_try


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_published_with_random123(counter, key, expected):
    words = philox4x32(*(torch.tensor([c]) for c in counter), *(torch.tensor([k]) for k in key))
    assert [int(w) for w in words] == expected


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    sample=st.integers(0, 2**31),
    position=st.integers(0, 2**31),
    vocab_size=st.integers(1, 5000),
    data=st.data(),
)
def test_noise_of_some_tokens_equals_the_vocabulary_s_bit_for_bit(seed, sample, position, vocab_size, data):
    keys = [torch.tensor([x]) for x in (seed, sample, position)]
    token = torch.tensor([data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=40))])
    whole = gumbel_noise_vocab(*keys, vocab_size)
    assert whole.shape == (1, vocab_size)
    assert torch.equal(gumbel_noise(*keys, token), whole.gather(1, token))


def test_noise_of_a_row_does_not_depend_on_the_rows_beside_it():
    seed, sample, position = torch.tensor([3, 4, 5]), torch.tensor([0, 1, 2]), torch.tensor([10, 11, 12])
    together = gumbel_noise_vocab(seed, sample, position, 4099)
    for i in range(3):
        assert torch.equal(gumbel_noise_vocab(seed[i], sample[i], position[i], 4099), together[i])
    spread = gumbel_noise(seed[:, None], sample[:, None], position, torch.arange(9).expand(3, 3, 9))
    assert torch.equal(spread[1, 1], together[1, :9])


@pytest.mark.parametrize("changed", ["low seed", "high seed", "sample", "position"])
def test_every_part_of_the_key_changes_the_noise(changed):
    seed, sample, position = (torch.tensor(x) for x in (7, 0, 100))
    before = gumbel_noise_vocab(seed, sample, position, 64)
    if changed == "low seed":
        seed = seed + 1
    elif changed == "high seed":
        seed = seed + 2**32
    elif changed == "sample":
        sample = sample + 1
    else:
        position = position + 1
    assert not torch.any(before == gumbel_noise_vocab(seed, sample, position, 64))


def test_noise_is_finite_bounded_and_exact_in_both_tails():
    words = words_to_try()
    noise = gumbel_from_word(words.to(torch.float32))
    rounded = (words.to(torch.float32) + 0.5).double() * 2.0**-32
    exact = -torch.log(-torch.log1p(-rounded.clamp(max=1 - 2.0**-24)))
    assert torch.all((noise > GUMBEL_MIN) & (noise < GUMBEL_MAX))
    assert torch.all((noise.double() - exact).abs() <= LOGARITHMS * exact.abs().clamp(min=1))


def test_noise_is_standard_gumbel():
    noise = gumbel_noise_vocab(torch.tensor(11), torch.tensor(0), torch.arange(20), 10_000).double().flatten()
    # Kolmogorov-Smirnov at 200,000 draws; 1.95 / sqrt(n) is passed by one fair sample in a thousand.
    cdf = torch.exp(-torch.exp(-noise.sort().values))
    steps = torch.arange(1, len(noise) + 1) / len(noise)
    assert float((cdf - steps).abs().max()) < 1.95 / math.sqrt(len(noise))
