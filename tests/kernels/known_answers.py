"""Philox4x32-10 as its authors publish it (Random123, tests/kat_vectors), and the words to try noise with."""

from __future__ import annotations

import torch

ONES = 0xFFFFFFFF

# Counter, key, words.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]

LOGARITHMS = 4 * 2.0**-24
"""How far noise made by any fp32 logarithms may be off, times max(1, |G|). Torch's own is off by 2.2 * 2^-24
at most: all 2.8e8 numbers that words round to were tried."""


def words_to_try() -> torch.Tensor:
    """int64: both ends, all around the powers of two, where fp32 changes its step, and some between."""
    powers = 2 ** torch.arange(32)
    around = (powers[:, None] + torch.tensor([-2, -1, 0, 1, 2])).flatten().clamp(0, ONES)
    between = torch.randint(0, 2**32, (4000,), generator=torch.Generator().manual_seed(0))
    words = torch.cat([torch.arange(2000), torch.arange(ONES - 2000, ONES + 1), around, between])
    return words[: len(words) // 16 * 16]
