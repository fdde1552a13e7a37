"""The machine and the libraries a measurement belongs to."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import transformers

from stages.bench.record import Record


class Hardware(Record):
    """Where a report was measured."""

    cpu: str
    cores: int
    threads: int
    gpu: str | None
    python: str
    torch: str
    transformers: str
    system: str


def hardware(device: torch.device) -> Hardware:
    """Of this process; `cores` are those it may run on, `threads` those torch computes with."""
    return Hardware(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        system=f"{platform.system()} {platform.machine()}",
    )


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
