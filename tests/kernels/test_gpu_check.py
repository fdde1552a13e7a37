from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_gpu_check_runs_small_without_a_gpu_and_finds_every_kernel_right(tmp_path):
    pytest.importorskip("triton")
    output = tmp_path / "check.json"
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--output", str(output)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
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
