"""How much memory was used at most."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

if sys.platform != "win32":
    import resource

_PROC = Path("/proc")


def own_peak() -> int | None:
    """Most bytes that this process has had resident so far; None where the system does not say."""
    if peak := _peak(os.getpid()):  # ru_maxrss may be that of the process that started this one
        return peak
    if sys.platform == "win32":
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def own_gpu_peak() -> int | None:
    """Most bytes that torch has had allocated on one GPU so far; None without one."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None


def group_peak(group: int) -> int | None:
    """Most bytes that the processes of a group have had resident, each at its own peak, added up.

    What they share counts several times, and what has ended not at all. None where /proc does not say.
    """
    peaks = [_peak(pid) for pid in group_members(group)]
    return sum(peaks) or None


def group_members(group: int) -> list[int]:
    """Processes of a process group; those that have ended but not been waited for are none."""
    found = []
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if folder.name.isdecimal():
            fields = _after_name(folder / "stat")
            if len(fields) > 2 and fields[0] not in "ZX" and int(fields[2]) == group:
                found.append(int(folder.name))
    return sorted(found)


def _after_name(stat: Path) -> list[str]:
    """Fields of a stat file behind the command's name, which may hold anything: state, parent, group."""
    try:
        return stat.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it has just ended
        return []


def _peak(pid: int) -> int:
    for line in _lines(_PROC / str(pid) / "status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _lines(path: Path) -> Iterable[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return ()
