"""The generator of the CPU ops, with vector instructions and without, against torch's: word for word."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu import load_ops
from kernels.cpu.build import FLAGS, SOURCE, compiler
from kernels.noise import gumbel_from_word, noise_words, uniform_from_word
from tests.kernels.known_answers import KNOWN_ANSWERS, LOGARITHMS, words_to_try

pytestmark = pytest.mark.skipif(load_ops() is not None, reason=f"no CPU ops: {load_ops()}")


class Noise:
    """`kernels/cpu/noise.h`, compiled as the ops are."""

    def __init__(self, folder: Path, *more: str) -> None:
        built = folder / "noise_words.so"
        source = Path(__file__).with_name("noise_words.cpp")
        command = [compiler(), *FLAGS, *more, "-Wno-psabi", f"-I{SOURCE.parent}", str(source)]
        subprocess.run([*command, "-o", str(built)], check=True)
        self.library = ctypes.CDLL(str(built))

    def rounds(self, counter: list[int], key: list[int]) -> tuple[list[int], Tensor]:
        """Of one counter, by numbers [4] and by vectors [4, 16]."""
        one, many = torch.empty(4, dtype=torch.uint32), torch.empty(4, 16, dtype=torch.uint32)
        where = (ctypes.c_void_p(t.data_ptr()) for t in (one, many))
        self.library.rounds((ctypes.c_uint32 * 4)(*counter), ctypes.c_uint64(key[0] + (key[1] << 32)), *where)
        return one.tolist(), many

    def words(self, seed: int, sample: int, position: int, first: int) -> tuple[Tensor, Tensor]:
        """Of 64 tokens from 4 * first on: together, and each by itself."""
        found = torch.empty(2, 64, dtype=torch.uint32)
        keys = (ctypes.c_int64(x) for x in (seed, sample, position))
        self.library.words(*keys, ctypes.c_uint32(first), *(ctypes.c_void_p(row.data_ptr()) for row in found))
        return found[0].long(), found[1].long()

    def noise(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """u and G of words, and the bound of G."""
        u, bound = torch.empty(2, len(words))
        g, given = torch.empty(len(words), dtype=torch.float64), words.to(torch.uint32)
        out = (ctypes.c_void_p(t.data_ptr()) for t in (u, g, bound))
        self.library.noise(ctypes.c_void_p(given.data_ptr()), ctypes.c_int64(len(words)), *out)
        return u, g, bound


@pytest.fixture(scope="module", params=[(), ("-mno-avx512f",)], ids=["native", "without avx512"])
def ops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Noise:
    return Noise(tmp_path_factory.mktemp("noise"), *request.param)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(ops: Noise, counter, key, expected) -> None:
    one, many = ops.rounds(counter, key)
    assert one == expected
    assert many.tolist() == [[word] * 16 for word in expected]


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    sample=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**34),
    first=st.integers(0, 2**20) | st.integers(2**29, 2**30),
)
def test_words_of_any_key_and_token_are_torch_s(
    ops: Noise, seed: int, sample: int, position: int, first: int
) -> None:
    together, apart = ops.words(seed, sample, position, first)
    expected = noise_words(*(torch.tensor(x) for x in (seed, sample, position)), 4 * first + torch.arange(64))
    assert torch.equal(together, expected)
    assert torch.equal(apart, expected)


def test_words_become_torch_s_numbers_and_its_noise_but_for_the_last_bits_of_logarithms(ops: Noise) -> None:
    words = words_to_try()
    u, g, bound = ops.noise(words)
    assert torch.equal(u, uniform_from_word(words.float()))
    off = (gumbel_from_word(words.float()).double() - g).abs()
    assert torch.all(off <= LOGARITHMS * g.abs().clamp(min=1))
    # What the draw skips by: never less than G, and little more than -log u.
    assert torch.all(bound >= g - 1e-5)
    assert torch.all(bound <= 0.061 - u.double().log())
