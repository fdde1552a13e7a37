"""The number format that states are stored in: as they are, in 16 bits, or in 8 with a scale a token.

fp8 is `float8_e4m3fn`: 3 bits of mantissa, so a number is off by 1/16 of itself at most, down to 1/28,672 of
its vector's largest. A vector is one token's state at one tap; its scale is its largest number over 448, the
format's largest. So outliers of one token or one layer cost the others nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.features.config import StorageName

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True)
class StorageFormat:
    """How vectors of states are stored.

    Attributes:
        dtype: of the numbers; `FP8` goes with an fp32 scale for each vector.
    """

    dtype: torch.dtype

    @classmethod
    def of(cls, name: StorageName, target_dtype: torch.dtype) -> StorageFormat:
        """The format a user named; "auto" is the target's own."""
        if name == "auto":
            return cls(target_dtype)
        return cls(FP8 if name == "fp8" else getattr(torch, name))

    @property
    def name(self) -> str:
        return "fp8" if self.scaled else str(self.dtype).removeprefix("torch.")

    @property
    def scaled(self) -> bool:
        return self.dtype == FP8

    def pack(self, states: Tensor, taps: int) -> tuple[Tensor, Tensor | None]:
        """States [n, taps * h] in this format, and the scales fp32 [n, taps] if it has such.

        Numbers beyond the range of a 16-bit format become infinite; see `finite`.
        """
        if not self.scaled:
            return states.to(self.dtype), None
        vectors = states.unflatten(-1, (taps, -1)).float()  # [n, taps, h]
        scale = vectors.abs().amax(-1) / FP8_MAX  # [n, taps]
        divisor = scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        packed = (vectors / divisor).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return packed.flatten(1), scale


def unpack(stored: Tensor, scale: Tensor | None) -> Tensor:
    """States [n, taps * h] to calculate with: bfloat16 from fp8 with its scales [n, taps] or [n]."""
    if scale is None:
        return stored
    taps = scale.shape[1] if scale.dim() == 2 else 1
    vectors = stored.float().unflatten(-1, (taps, -1))
    return (vectors * scale.view(-1, taps, 1)).to(torch.bfloat16).flatten(1)


def finite(states: Tensor, scale: Tensor | None) -> Tensor:
    """A bool on the device of the states: whether none of them is infinite or not a number."""
    numbers = states if scale is None else scale
    largest = numbers.abs().amax() if numbers.numel() else numbers.new_zeros(())
    return torch.isfinite(largest)
