"""Compiles the CPU ops on first use and registers them with torch, under ``torch.ops.eagle_cpu``."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).parent / "ops.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fopenmp", "-fPIC", "-shared")
COMPILE_S = 300.0

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


def _load() -> str | None:
    if os.environ.get("EAGLE_CPU_OPS") == "off":
        return "EAGLE_CPU_OPS=off"
    if platform.system() != "Linux":
        return f"they are built on Linux only, not on {platform.system()}"
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        return "there is no C++ compiler: install g++, or set CXX"
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    try:
        library = Path(folder).expanduser() / "eagle" / f"{_key(compiler)}.so"
        if not library.exists():
            _compile(compiler, library)
        torch.ops.load_library(str(library))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        return next((line.strip() for line in detail.splitlines() if "error" in line), detail.strip())[:300]
    _register_shapes()
    return None


def _key(compiler: str) -> str:
    """Of everything that the library depends on, this machine's instructions included."""
    cpu = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), ""
    )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (SOURCE.read_text(), *FLAGS, torch.__version__, cpu, version)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, library: Path) -> None:
    """Build into ``library``, whole or not at all; two processes may do so at once."""
    root = Path(torch.__file__).parent
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
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


def _register_shapes() -> None:
    """What torch.compile must know of the ops: the shapes and dtypes of their results."""

    @torch.library.register_fake("eagle_cpu::linear")
    def _linear(x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        return x.new_empty((*x.shape[:-1], outputs))

    @torch.library.register_fake("eagle_cpu::pack")
    def _pack(weight: Tensor) -> Tensor:
        return weight.new_empty(-(-weight.shape[0] // 64) * 64 * weight.shape[1])

    @torch.library.register_fake("eagle_cpu::norm")
    def _norm(x: Tensor, weight: Tensor, eps: float, kind: int) -> Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake("eagle_cpu::argmax")
    def _argmax(values: Tensor) -> Tensor:
        return values.new_empty(values.shape[:-1], dtype=torch.int64)

    @torch.library.register_fake("eagle_cpu::attend")
    def _attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        places: Tensor,
        cache: Tensor,
        layer: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        return q.new_empty((1, q.shape[2], q.shape[1], q.shape[3]))
