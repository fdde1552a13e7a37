"""Compiles the CPU ops on first use and registers them with torch, under ``torch.ops.eagle_cpu``."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "ops.cpp"
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++20", "-fopenmp", "-fPIC", "-shared")
"""A compiler that may contract a * b + c does so in one copy of a loop and not in another, and then a row has
other bits by which of them it meets. Where it pays, `fused` in numbers.h says so."""

COMPILE_S = 300.0

LOCKED_WITHIN_S = 60.0
"""A folder that was made in so many seconds may not be locked yet."""

_lock = threading.Lock()
_outcome: list[str | None] = []


def load_ops() -> str | None:
    """Register the ops, once a process.

    A machine compiles them once, into ``$TORCH_EXTENSIONS_DIR`` or ``~/.cache/torch_extensions``, where torch
    keeps such things; remove its folder ``eagle`` and they are compiled again.

    Returns:
        None, or why they cannot be had: callers then go on with torch's own operations.
    """
    with _lock:
        if not _outcome:
            _outcome.append(_load())
        return _outcome[0]


def ops_loaded() -> bool:
    """Whether ``load_ops`` has succeeded in this process."""
    return bool(_outcome) and _outcome[0] is None


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    return os.environ.get("CXX") or shutil.which("g++")


def _load() -> str | None:
    if os.environ.get("EAGLE_CPU_OPS") == "off":
        return "EAGLE_CPU_OPS=off"
    if platform.system() != "Linux":
        return f"they are built on Linux only, not on {platform.system()}"
    command = compiler()
    if command is None:
        return "there is no C++ compiler: install g++, or set CXX"
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    try:
        library = Path(folder).expanduser() / "eagle" / f"{_key(command)}.so"
        remove_abandoned(library.parent)
        if not library.exists():
            _compile(command, library)
        torch.ops.load_library(str(library))
        os.register_at_fork(after_in_child=_alone)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return next((line.strip() for line in detail.splitlines() if "error" in line), detail.strip())[:300]
    return None


def _alone() -> None:
    """A forked process has none of OpenMP's threads, and would wait for them, in torch's operations too."""
    torch.set_num_threads(1)


def _key(compiler: str) -> str:
    """Of everything that the library depends on, this machine's instructions included."""
    cpu = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), ""
    )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    sources = (path.read_text() for path in sorted((*SOURCE.parent.glob("*.h"), SOURCE)))
    parts = (*sources, *FLAGS, torch.__version__, cpu, version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, library: Path) -> None:
    """Build into ``library``, whole or not at all; two processes may do so at once."""
    root = Path(torch.__file__).parent
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, _held(folder):
        built = Path(folder) / library.name
        subprocess.run(
            [
                compiler,
                *FLAGS,
                f"-I{root / 'include'}",
                f"-I{root / 'include/torch/csrc/api/include'}",
                str(SOURCE),
                "-o",
                str(built),
                f"-L{root / 'lib'}",
                "-ltorch",
                "-ltorch_cpu",
                "-lc10",
            ],
            check=True,
            capture_output=True,
            text=True,
            timeout=COMPILE_S,
        )
        built.replace(library)


def remove_abandoned(parent: Path) -> None:
    """Remove what a process that was killed while it compiled has left in ``parent``; one that still compiles
    holds a lock on its folder."""
    import fcntl

    for folder in parent.glob(f"{tempfile.gettempprefix()}*"):
        with suppress(OSError):  # gone meanwhile, another user's, or on a file system without locks
            if time.time() - folder.stat().st_mtime < LOCKED_WITHIN_S:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextmanager
def _held(folder: str) -> Iterator[None]:
    """Show ``remove_abandoned`` that this process lives; the lock goes with it."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
