"""The parts of `benchmarks.gpu_check`."""

from __future__ import annotations

import os

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

if not CUDA:
    # Triton reads it when it is first imported, which the other parts do.
    os.environ.setdefault("TRITON_INTERPRET", "1")
