"""Whether the kernels are right and fast on this machine's GPU, in one run of under four minutes.

    python -m benchmarks.gpu_check [--output FILE] [--small] [--tilings] [--no-engine]

Builds every kernel, compares each with float64, times it against PyTorch's attention and against the time
that its bytes take at the copy bandwidth measured here, captures a cycle of all kernels as a CUDA graph, and
runs the engine on a Llama-3.1-8B of random weights: its cycle with a draft head, captured and not, and with a
drafter of known acceptance in the host's loop, the device's and the overlapped one. Ends with tables and a
JSON file, and fails if a result is wrong or the goal for attention is missed. Needs torch, triton,
transformers and numpy, 24 GB of GPU memory, and for the engine what the project needs; without that the
engine is left out.

Without a GPU it runs small, in Triton's interpreter: the results are checked, the times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.gpu import CUDA
from benchmarks.gpu.checks import check_acceptance, check_attention, check_compaction, check_draft
from benchmarks.gpu.cycle import run_cycle
from benchmarks.gpu.engine import run_engine
from benchmarks.gpu.loop import run_loop
from benchmarks.gpu.report import Report, machine
from benchmarks.gpu.size import FULL, SMALL, Size
from benchmarks.gpu.times import copy_bandwidth, time_attention, time_others, time_tilings


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/gpu-check.json"), help="the JSON file")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on a GPU too")
    parser.add_argument(
        "--tilings", action="store_true", help="time other tilings of attention too (minutes)"
    )
    parser.add_argument("--no-engine", action="store_true", help="kernels only")
    arguments = parser.parse_args()
    size = SMALL if arguments.small or not CUDA else FULL

    report, start = Report(), time.perf_counter()
    with torch.inference_mode():
        bandwidth = copy_bandwidth(size)
        report.machine = machine(bandwidth)
        print(json.dumps(report.machine))
        for check in (check_attention, check_acceptance, check_draft, check_compaction):
            part(report, check, size)
        part(report, lambda report, size: time_attention(report, size, bandwidth), size, "time_attention")
        part(report, lambda report, size: time_others(report, size, bandwidth), size, "time_others")
        part(report, run_cycle, size)
        if arguments.tilings:
            part(report, time_tilings, size)
    if CUDA:
        torch.cuda.empty_cache()
    if arguments.no_engine:
        report.engine = {"left_out": "not asked for"}
    else:
        for run in (run_loop, run_engine):
            part(report, if_installed(run), size, run.__name__)
            if CUDA:
                torch.cuda.empty_cache()
    report.seconds["all"] = time.perf_counter() - start

    report.print_tables()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(asdict(report), indent=1) + "\n")
    failed = report.failed
    print(f"\n{len(report.checks)} checks, {len(failed)} failed; {report.seconds['all']:.0f} s")
    print(f"{arguments.output} has everything")
    return 1 if failed else 0


def part(report: Report, run: Callable[[Report, Size], None], size: Size, name: str | None = None) -> None:
    """Run one part; a fault in it is a failed check, and the others still run."""
    name = name or run.__name__
    print(name.replace("_", " "), flush=True)
    start = time.perf_counter()
    try:
        run(report, size)
    except Exception:
        report.check(name, False, traceback.format_exc())
    report.seconds[name] = time.perf_counter() - start


def if_installed(run: Callable[[Report, Size], None]) -> Callable[[Report, Size], None]:
    """A part that is left out where the project's own dependencies are missing."""

    def tried(report: Report, size: Size) -> None:
        try:
            run(report, size)
        except ImportError as error:
            report.engine = {"left_out": f"the project is not installed: {error}"}

    return tried


if __name__ == "__main__":
    sys.exit(main())
