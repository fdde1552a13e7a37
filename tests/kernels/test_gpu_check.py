from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ON_A_SIMULATED_GPU = """
import sys
import torch
from tests.gpu.simulated import simulated_gpu

with simulated_gpu():
    import benchmarks.gpu.checks
    import benchmarks.gpu_check

    {change}
    sys.exit(benchmarks.gpu_check.main())
"""


WITH_FEW_PACKAGES = """
import sys

missing = ("accelerate", "datasets", "fastapi", "fsspec", "gguf", "llguidance", "pyarrow", "typer")
sys.modules |= dict.fromkeys(missing)
import benchmarks.gpu_check

sys.exit(benchmarks.gpu_check.main())
"""


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def on_a_simulated_gpu(output: Path, *flags: str, change: str = "") -> subprocess.CompletedProcess[str]:
    pytest.importorskip("triton")
    script = ON_A_SIMULATED_GPU.format(change=change)
    return run(["-c", script, "--small", "--output", str(output), *flags])


def test_the_gpu_check_runs_small_without_a_gpu_and_finds_every_kernel_right(tmp_path):
    pytest.importorskip("triton")
    output = tmp_path / "check.json"
    result = run(["-c", WITH_FEW_PACKAGES, "--output", str(output)], TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(output.read_text())
    checked = {check["name"].split(",")[0].split(":")[0] for check in found["checks"]}
    assert checked >= {
        "attention",
        "noise",
        "filters",
        "acceptance",
        "draft top-k",
        "compaction",
        "loop",
        "engine",
    }
    assert all(check["passed"] for check in found["checks"])
    runs = {(row["drafter"], row["loop"]) for row in found["engine"]["runs"]}
    assert runs >= {("none", "host"), ("oracle:0.8", "device"), ("oracle:0.8", "overlapped")}
    assert all(row["us"] > 0 for row in found["attention"] + found["kernels"])


def test_on_a_gpu_a_part_that_fails_is_one_line_and_the_others_run(tmp_path):
    """On a simulated one, where the ways that only a GPU takes are taken: streams, events, graphs."""
    output, flags = tmp_path / "check.json", ("--no-engine",)
    change = "benchmarks.gpu.checks.compact_triton = lambda *_: torch.zeros(2) @ torch.zeros(3)"
    result = on_a_simulated_gpu(output, *flags, change=change)
    assert result.returncode == 1, result.stderr
    found = json.loads(output.read_text())
    assert [check["name"] for check in found["checks"] if not check["passed"]] == ["check_compaction"]
    [line] = [line for line in result.stdout.splitlines() if "FAIL" in line]
    assert "check_compaction: RuntimeError" in line
    assert "in check_compaction" in found["faults"]["check_compaction"]
    assert {check["name"] for check in found["checks"]} >= {
        "cycle: never waits for the GPU",
        "cycle: its graph gives the same results",
    }
    assert found["machine"]["copy_gb_per_s"] > 0
    assert len(found["attention"]) == 2


def test_where_a_fault_has_lost_the_gpu_the_rest_runs_in_a_new_process(tmp_path):
    output = tmp_path / "check.json"
    change = """
    import os
    whole = torch.cuda.synchronize
    def lost(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
    def broken(*_, **__):
        torch.cuda.synchronize = lost
        lost()
    def anew(program, arguments):
        torch.cuda.synchronize, sys.argv = whole, arguments[2:]
        print("anew", *arguments[1:])
        sys.exit(benchmarks.gpu_check.main())
    os.execv = anew
    benchmarks.gpu.checks.tree_attention_triton = broken"""
    result = on_a_simulated_gpu(output, "--no-engine", change=change)
    assert f"anew -m benchmarks.gpu_check --small --output {output} --no-engine --go-on" in result.stdout
    found = json.loads(output.read_text())
    assert next(iter(found["seconds"])) == "check_attention"
    assert len(found["seconds"]) == 8
    failed = [check for check in found["checks"] if not check["passed"]]
    assert len(failed) == 4  # its three cases, and the part
    assert all("illegal memory access" in check["found"] for check in failed)


@pytest.mark.slow
def test_on_a_simulated_gpu_the_engine_s_parts_pass_too(tmp_path):
    output = tmp_path / "check.json"
    result = on_a_simulated_gpu(output)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(output.read_text())
    names = {check["name"] for check in found["checks"]}
    assert {f"loop: {tree}, batch 2: never waits for the GPU" for tree in ("chain", "dynamic")} <= names
    assert len(found["loops"]) == 4
