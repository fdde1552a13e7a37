from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_the_kernels_needs_no_triton():
    result = run(
        ["-c", "import sys; sys.modules['triton'] = None; import kernels; print(len(kernels.__all__))"]
    )
    assert result.returncode == 0, result.stderr


def test_every_triton_kernel_agrees_with_its_reference_in_the_interpreter():
    pytest.importorskip("triton")
    arguments = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/kernels/triton_ops.py",
        "tests/kernels/triton_noise.py",
    ]
    result = run(arguments, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout


STACK_BYTES = 64
"""Registers that a build may spill, in bytes a thread: a few around the loop, none of what it computes."""


def builds(arch: str, *, quick: bool):
    pytest.importorskip("triton")
    from kernels.ahead_of_time import builds

    return [build for build in builds(arch) if build.quick or not quick]


def check(build, arch: str) -> None:
    from kernels.ahead_of_time import SHARED_BYTES, compile_build

    binary, resources = compile_build(build, arch)
    assert binary.asm["cubin" if arch.isdigit() else "hsaco"]
    assert resources.shared <= SHARED_BYTES[arch], build.name
    # fp32 has no matrix units, and at the largest head size not enough registers either; it is for tests.
    allowed = 4 * STACK_BYTES if build.dtype == torch.float32 else STACK_BYTES
    assert resources.stack is None or resources.stack <= allowed, build.name
    if build.name.startswith("attention") and "merge" not in build.name:
        places = max(1, 8 // build.warps)  # programs at a time on a multiprocessor: see `split_count`
        assert resources.shared * places <= SHARED_BYTES[arch], build.name
    if build.name.startswith(("attention bf16", "attention fp16")):
        text = binary.asm["ptx" if arch.isdigit() else "amdgcn"]
        units = ("mma.sync", "wgmma", "tcgen05.mma") if arch.isdigit() else ("v_mfma",)
        assert any(unit in text for unit in units), "not on the matrix units"
    if build.name.startswith(("attention bf16", "attention fp16")) and arch.isdigit():
        assert "cp.async.cg" in binary.asm["ptx"], "the cache is not read ahead, 16 bytes at a time"


@pytest.mark.parametrize("arch", ["80", "90", "100", "gfx942"])
class TestCompilesAheadOfTimeWithinLimits:
    def test_every_kernel(self, arch):
        for build in builds(arch, quick=True):
            check(build, arch)

    @pytest.mark.slow
    def test_every_build(self, arch):
        for build in builds(arch, quick=False):
            check(build, arch)


def test_the_kept_report_has_every_build():
    kept = (ROOT / "kernels" / "RESOURCES.md").read_text()
    names = [build.name for build in builds("90", quick=False)]
    assert [line.split(" | ")[0].removeprefix("| ") for line in kept.splitlines()[5:]] == names


@pytest.mark.parametrize("programs", [1, 8, 64, 100, 264, 300, 5000])
def test_splits_fill_the_gpu_where_the_cache_is_long_enough(programs):
    pytest.importorskip("triton")
    from kernels.tree_attention_triton import split_count

    places = 264
    splits = split_count(programs, 1000, places)
    rounds = -(-programs * splits // places)
    assert programs * splits / (rounds * places) > 0.85 or splits > 0.9 * 64
    assert split_count(programs, 1, places) == 1
