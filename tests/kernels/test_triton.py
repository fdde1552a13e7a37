from __future__ import annotations

import importlib
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
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/triton_ops.py"]
    result = run(arguments, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout


SHARED_BYTES = {"80": 163 << 10, "90": 227 << 10, "100": 227 << 10, "gfx942": 64 << 10}


def compiled(
    kernel: str,
    arch: str,
    pointers: str = "*i64",
    options: dict[str, int] | None = None,
    **constants: int | bool,
):
    """Compile a kernel ahead of time, with no GPU at hand.

    Args:
        kernel: module:function below `kernels`.
        arch: CUDA compute capability or gfx name.
        pointers: type of the model's own tensors; a kernel's other arguments have their launcher's types.
        constants: values of compile-time parameters, and of integers that a launch specialises for being 1.
    """
    pytest.importorskip("triton")
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = kernel.split(":")
    function = getattr(importlib.import_module(f"kernels.{module}"), name)
    own = {"acc_ptr": "*fp32", "top_ptr": "*fp32", "total_ptr": "*fp32", "best_ptr": "*fp32"}
    own |= {"temperature_ptr": "*fp32", "scale": "fp32", "softcap": "fp32"}
    own |= dict.fromkeys(
        ("query_ptr", "key_ptr", "value_ptr", "logits_ptr", "cache_ptr", "out_ptr"), pointers
    )
    if module == "accept_triton":
        own["token_ptr"] = "*i32"
    types = {}
    for argument in function.arg_names:
        if argument in constants:
            types[argument] = "constexpr"
        elif argument in own:
            types[argument] = own[argument]
        else:
            types[argument] = (
                "*i64" if argument.endswith("_ptr") else "i64" if "stride" in argument else "i32"
            )
    cuda = arch.isdigit()
    target = GPUTarget("cuda", int(arch), 32) if cuda else GPUTarget("hip", arch, 64)
    source = ASTSource(fn=function, signature=types, constexprs=constants)
    binary = compile_kernel(source, target=target, options={"enable_fp_fusion": True} | (options or {}))
    assert binary.asm["cubin" if cuda else "hsaco"]
    assert binary.metadata.shared <= SHARED_BYTES[arch]
    return binary


ONE_NODE = {"nodes": 1, "kv_heads": 1, "group": 1}
PLAIN = {"WINDOW": False, "SOFTCAP": False}
MASKED = {"WINDOW": True, "SOFTCAP": True}
slow = pytest.mark.slow


def compiled_attention(arch: str, dtype: str, dim: int, rows: int | None = None, **constants: int | bool):
    from kernels.tree_attention_triton import blocks

    most_rows, keys = blocks(getattr(torch, dtype), dim)
    pointers = {"bfloat16": "*bf16", "float32": "*fp32"}[dtype]
    options = {"num_warps": 4, "num_stages": 2}
    constants |= {"ROWS": rows or most_rows, "KEYS": keys, "DIM": dim}
    return compiled("tree_attention_triton:_split_kernel", arch, pointers, options, **constants)


@pytest.mark.parametrize(
    "arch", ["80", "90", pytest.param("100", marks=slow), pytest.param("gfx942", marks=slow)]
)
class TestCompilesAheadOfTime:
    def test_noise(self, arch):
        compiled("noise_triton:_token_kernel", arch, "*fp32", BLOCK=1024)
        compiled("noise_triton:_vocab_kernel", arch, "*fp32", BLOCK=1024)

    def test_acceptance(self, arch):
        compiled("accept_triton:_tile_kernel", arch, "*bf16", BLOCK=1024)
        compiled("accept_triton:_walk_kernel", arch, NODES=64, TILES=16)
        compiled("accept_triton:_walk_kernel", arch, NODES=1, TILES=16, nodes=1, tiles=1)

    def test_compaction(self, arch):
        compiled("compact_triton:_compact_kernel", arch, "*bf16", DIM=128)
        compiled("compact_triton:_compact_kernel", arch, "*bf16", DIM=64, layers=1, nodes=1, stride_dim=1)

    def test_attention_to_the_matrix_units(self, arch):
        binary = compiled_attention(arch, "bfloat16", 64, rows=16, **PLAIN)
        assert "mma" in binary.asm.get("ptx", "") or "v_mfma" in binary.asm.get("amdgcn", "")

    def test_the_merge_of_splits(self, arch):
        merge = "tree_attention_triton:_merge_kernel"
        compiled(merge, arch, "*bf16", SPLITS=32, DIM=64)
        compiled(merge, arch, "*bf16", SPLITS=1, DIM=64, splits=1, nodes=1, query_heads=1)

    @slow
    @pytest.mark.parametrize(("dtype", "dim"), [("bfloat16", 128), ("bfloat16", 256), ("float32", 256)])
    def test_attention_with_full_tiles_window_and_cap(self, arch, dtype, dim):
        compiled_attention(arch, dtype, dim, **MASKED)

    @slow
    def test_attention_of_a_single_node_and_head(self, arch):
        compiled_attention(arch, "bfloat16", 64, rows=16, **PLAIN, **ONE_NODE)
