"""Seeds for engines whose noise we do not make."""

from __future__ import annotations

import hashlib

from stages.decoding import SamplingParams

SEED_BITS = 63  # what a signed integer of 64 bits holds, as these engines want it


def outside_seed(params: SamplingParams) -> int:
    """One number for seed and sample; the seed itself for the first sample."""
    if params.sample == 0:
        return params.seed % (1 << SEED_BITS)
    key = hashlib.sha256(f"{params.seed}\0{params.sample}".encode()).digest()
    return int.from_bytes(key[:8], "little") % (1 << SEED_BITS)
