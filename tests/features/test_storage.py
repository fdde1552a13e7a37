"""Claims about storing states in fewer bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.features.storage import FP8, StorageFormat, finite, unpack

FP8_STORAGE = StorageFormat(FP8)


@given(st.integers(0, 1000), st.integers(-20, 20), st.sampled_from([1.0, 30.0, 3000.0]))
def test_fp8_is_off_by_a_sixteenth_at_most_whatever_the_size_and_the_outliers(
    seed: int, exponent: int, outlier: float
) -> None:
    states = torch.randn(8, 3 * 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    states[:, 5] *= outlier  # one number of the low state, as targets have them
    stored, scale = FP8_STORAGE.pack(states, taps=3)
    assert (stored.dtype, scale.dtype, scale.shape) == (FP8, torch.float32, (8, 3))
    found = unpack(stored, scale).float()
    smallest = states.unflatten(1, (3, 64)).abs().amax(-1).div(28_672).repeat_interleave(64, dim=1)
    assert ((found - states).abs() <= states.abs() / 15 + smallest).all(), "1/16, and bfloat16 on the way out"
    assert ((found - states).norm() / states.norm()) < 0.035


def test_a_token_or_a_tap_does_not_change_the_others() -> None:
    states = torch.randn(4, 3 * 16, generator=torch.Generator().manual_seed(0))
    alone = unpack(*FP8_STORAGE.pack(states, taps=3))
    louder = states.clone()
    louder[2, 16:32] *= 1000
    beside = unpack(*FP8_STORAGE.pack(louder, taps=3))
    same = torch.ones_like(states, dtype=torch.bool)
    same[2, 16:32] = False
    assert torch.equal(alone[same], beside[same])


def test_states_of_zeros_stay_zeros() -> None:
    assert not unpack(*FP8_STORAGE.pack(torch.zeros(2, 6), taps=3)).any()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_other_formats_keep_what_they_can_hold(name: str) -> None:
    storage = StorageFormat.of(name, torch.bfloat16)
    states = torch.randn(4, 6)
    stored, scale = storage.pack(states, taps=3)
    assert scale is None
    assert torch.equal(unpack(stored, scale), states.to(getattr(torch, name)))


def test_auto_is_the_format_of_the_target() -> None:
    assert StorageFormat.of("auto", torch.float32) == StorageFormat(torch.float32)
    assert StorageFormat.of("fp8", torch.float32).name == "fp8"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["bfloat16", "float32", "fp8"])
def test_what_is_not_finite_is_found(name: str, bad: float) -> None:
    storage = StorageFormat.of(name, torch.float32)
    states = torch.randn(4, 6)
    assert finite(*storage.pack(states, taps=3))
    states[1, 2] = bad
    assert not finite(*storage.pack(states, taps=3))


def test_what_float16_cannot_hold_is_found() -> None:
    assert not finite(*StorageFormat(torch.float16).pack(torch.tensor([[1.0, 2.0, 1e5]]), taps=3))
