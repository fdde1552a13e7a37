"""Which implementation of an op runs: Triton where the tensors are on CUDA or ROCm, torch everywhere else."""

from __future__ import annotations

import importlib.util

from torch import Tensor

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def use_triton(tensor: Tensor) -> bool:
    """Whether ops on this tensor take their Triton kernel; without triton a GPU runs the torch reference."""
    return tensor.is_cuda and _HAS_TRITON
