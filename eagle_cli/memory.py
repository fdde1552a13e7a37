"""Out of memory, whatever says so: Python, numpy, Arrow, torch on a CPU, or a GPU."""

from __future__ import annotations

import errno
import math
import re

_ON_CPU = re.compile(r"DefaultCPUAllocator|can't allocate memory|std::bad_alloc")
_ON_GPU = re.compile(r"(CUDA|HIP).*out of memory|CU(DA|BLAS)_\w+_(ALLOC_FAILED|OUT_OF_MEMORY)")
_ASKED = re.compile(r"allocate (\d[\d.]*) ?(bytes|[KMGTPE]iB)")


def wanting(error: BaseException | None) -> str | None:
    """`out of GPU memory (2.00 GiB more)`, or None for an error of another kind.

    torch is not asked, so that nothing is imported for it.
    """
    while error is not None:
        text = str(error)
        on_gpu = bool(_ON_GPU.search(text)) or _named(error, "OutOfMemoryError")
        if on_gpu or _on_cpu(error, text):
            where = "GPU " if on_gpu else ""
            asked = _ASKED.search(text)
            return f"out of {where}memory" + (f" ({_with_unit(*asked.groups())} more)" if asked else "")
        error = error.__cause__
    return None


def _named(error: BaseException, name: str) -> bool:
    return any(each.__name__ == name for each in type(error).__mro__)


def _on_cpu(error: BaseException, text: str) -> bool:
    """torch has no type of its own for a CPU without memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_ON_CPU.search(text)))


def _with_unit(number: str, unit: str) -> str:
    """In the unit that torch and numpy would have chosen, where only bytes were said."""
    if unit != "bytes":
        return f"{number} {unit}"
    count, units = float(number), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    power = min(int(math.log(max(count, 1), 1024)), len(units) - 1)
    return f"{count / 1024**power:.2f} {units[power]}"
