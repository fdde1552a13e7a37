"""Whether the kernels are right and fast on this machine's GPU, in one run of under four minutes.

    python -m benchmarks.gpu_check [--output FILE] [--small] [--tilings] [--no-engine]

Builds every kernel, compares each with float64, times it against PyTorch's attention and against the time
that its bytes take at the copy bandwidth measured here, captures a cycle of all kernels as a CUDA graph, and
runs the engine on a Llama-3.1-8B of random weights: its cycle with a draft head, captured and not, and with a
drafter of known acceptance in the host's loop, the device's and the overlapped one. Ends with tables and a
JSON file, and fails if a result is wrong or the goal for attention is missed. Needs torch, triton, numpy and
24 GB of GPU memory, and for the engine transformers and pydantic; without those the engine is left out.

No part needs another: what fails, for want of memory too, is a failed check with its own line, and the JSON
file is written after every part. Where a fault has made the GPU unusable for this process, the parts that are
left run in a new one.

Without a GPU it runs small, in Triton's interpreter: the results are checked, the times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu import CUDA
from benchmarks.gpu.checks import check_acceptance, check_attention, check_compaction, check_draft
from benchmarks.gpu.cycle import run_cycle
from benchmarks.gpu.engine import run_engine
from benchmarks.gpu.loop import run_loop
from benchmarks.gpu.report import Report, machine
from benchmarks.gpu.size import FULL, SMALL, Size
from benchmarks.gpu.times import measure_bandwidth, time_attention, time_others, time_tilings

Part = Callable[[Report, Size], None]

KERNELS: tuple[Part, ...] = (
    check_attention,
    check_acceptance,
    check_draft,
    check_compaction,
    measure_bandwidth,
    time_attention,
    time_others,
    run_cycle,
)
ENGINE: tuple[Part, ...] = (run_loop, run_engine)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/gpu-check.json"), help="the JSON file")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on a GPU too")
    parser.add_argument(
        "--tilings", action="store_true", help="time other tilings of attention too (minutes)"
    )
    parser.add_argument("--no-engine", action="store_true", help="kernels only")
    parser.add_argument("--go-on", action="store_true", help="leave out the parts that the JSON file has")
    arguments = parser.parse_args()
    size = SMALL if arguments.small or not CUDA else FULL
    report = Report.read(arguments.output) if arguments.go_on else Report(machine=machine())
    print(json.dumps(report.machine), flush=True)
    if arguments.no_engine:
        report.engine = {"left_out": "not asked for"}
    for run in (*KERNELS, *(time_tilings,) * arguments.tilings, *(() if arguments.no_engine else ENGINE)):
        if run.__name__ in report.seconds:
            continue
        usable = part(report, run, size)
        report.write(arguments.output)
        if not usable:
            print("the GPU cannot be used any more by this process; the rest runs in a new one", flush=True)
            again = [a for a in sys.argv[1:] if a != "--go-on"]
            os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu_check", *again, "--go-on"])

    report.print_tables()
    failed = report.failed
    print(f"\n{len(report.checks)} checks, {len(failed)} failed; {sum(report.seconds.values()):.0f} s")
    for name in failed:
        print(f"  {name}")
    print(f"{arguments.output} has everything")
    return 1 if failed else 0


def part(report: Report, run: Part, size: Size) -> bool:
    """Run one part; returns whether the GPU can still be used."""
    print(run.__name__.replace("_", " "), flush=True)
    start = time.perf_counter()
    with report.attempt(run.__name__):
        run(report, size)
    report.seconds[run.__name__] = time.perf_counter() - start
    gc.collect()
    if CUDA:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
