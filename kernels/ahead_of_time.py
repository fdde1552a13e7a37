"""Every kernel compiled without a GPU, for the GPUs that matter, and what each build takes of them.

    python -m kernels.ahead_of_time [arch ...] [--report FILE]

A build has the constants and types that the launchers choose, with 16-byte aligned pointers and strides.
Registers, and bytes that did not fit them (spills, on the stack of a thread), are read from the binary by the
tools that come with triton; `RESOURCES.md` beside this file keeps the table."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import (
    accept_triton,
    compact_triton,
    draft_topk_triton,
    filters_triton,
    noise_triton,
    tree_attention_triton,
)

ARCHITECTURES = ("80", "90", "100", "gfx942")
"""CUDA compute capabilities (A100, H100 and H200, B200) and AMD's MI300."""

SHARED_BYTES = {"80": 163 << 10, "90": 227 << 10, "100": 227 << 10, "gfx942": 64 << 10}
"""Shared memory that one program may have."""

_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_FP32_POINTERS = {
    "lse_ptr",
    "best_ptr",
    "floor_ptr",
    "temperature_ptr",
    "top_p_ptr",
    "min_p_ptr",
    "part_ptr",
    "scores_ptr",
    "score_ptr",
    "strength_ptr",
}
_MODEL_POINTERS = {
    "query_ptr",
    "key_ptr",
    "value_ptr",
    "logits_ptr",
    "cache_ptr",
    "states_ptr",
    "weight_ptr",
}


_ALIGNED = {"dim", "width", "vocab_size"}
"""Integers that real models have as multiples of 16, and that a launch specialises for it."""


@dataclass(frozen=True)
class Build:
    """One kernel with one set of constants.

    dtype: of the model's own tensors; out_ptr is a pointer to fp32 where `fp32_out`.
    constants: compile-time parameters, and integers that a launch specialises for being 1.
    quick: compiled by the fast tests too.
    """

    name: str
    kernel: Any
    constants: dict[str, int | bool]
    dtype: torch.dtype = torch.bfloat16
    warps: int = 4
    fp32_out: bool = False
    quick: bool = False
    types: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """What a build takes: bytes of shared memory a program; registers and bytes of stack a thread, None where
    no tool says."""

    shared: int
    registers: int | None
    stack: int | None


def builds(arch: str) -> Iterator[Build]:
    """All builds for an architecture."""
    hip = arch.startswith("gfx")
    bf16, fp32 = torch.bfloat16, torch.float32
    yield Build("noise of tokens", noise_triton._token_kernel, {"BLOCK": 1024}, fp32_out=True, quick=True)
    yield Build("noise of a vocabulary", noise_triton._vocab_kernel, {"BLOCK": 1024}, fp32_out=True)

    for dtype, bits in ((bf16, 16), (fp32, 32)):
        for allowed in (False, True):
            yield Build(
                f"filters {_name(dtype)}{', allowed tokens' * allowed}",
                filters_triton._floor_kernel,
                {"ALLOWED": allowed, "BITS": bits, "BLOCK": 2048},
                dtype,
                warps=8,
                quick=dtype == bf16 and not allowed,
            )
    for filtered, allowed in ((False, False), (True, True)):
        yield Build(
            f"accept: tile{', filtered' * filtered}",
            accept_triton._tile_kernel,
            {"FILTERED": filtered, "ALLOWED": allowed, "BLOCK": 1024},
            types={"token_ptr": "*i32"},
            quick=filtered,
        )
    for dtype, rows in ((bf16, 16), (bf16, 64), (bf16, 256), (fp32, 16)):
        block_rows, block_tokens, warps = accept_triton.head_tiles(rows, dtype)
        yield Build(
            f"accept: LM head {_name(dtype)}, {rows} rows",
            accept_triton._head_kernel,
            {
                "SOFTCAP": rows == 16,
                "ALLOWED": rows == 16,
                "ROWS": block_rows,
                "TOKENS": block_tokens,
                "WIDTH": 64 if dtype == bf16 else 32,
                "EVEN": rows > 16,
                "STAGES": 3,
                "states_stride_dim": 1,
                "weight_stride_dim": 1,
            },
            dtype,
            warps,
            types={"token_ptr": "*i32"},
            quick=rows == 64,
        )
    for nodes in (1, 16, 64):
        yield Build(
            f"accept: walk, {nodes} nodes",
            accept_triton._walk_kernel,
            {"NODES": nodes, "TILES": accept_triton.walk_tiles(nodes)} | ({"nodes": 1} if nodes == 1 else {}),
            types={"token_ptr": "*i32"},
            quick=nodes == 64,
        )
    for mapped in (False, True):
        yield Build(
            f"draft top-k{', mapped' * mapped}",
            draft_topk_triton._topk_kernel,
            {"MAPPED": mapped, "HEATED": mapped, "NOISE": mapped, "K": 16, "BLOCK": 4096},
            warps=8,
            quick=mapped,
        )
    for dim, single in ((128, False), (64, True)):
        yield Build(
            f"compact, head size {dim}",
            compact_triton._compact_kernel,
            {"DIM": dim, "stride_dim": 1} | ({"layers": 1, "nodes": 1} if single else {}),
            warps=1,
            quick=not single,
        )

    shapes = [(torch.float16, 128, 64), (bf16, 64, 16), (bf16, 64, 32), (bf16, 64, 64), (bf16, 64, 128)]
    shapes += [(bf16, 128, 16), (bf16, 128, 32), (bf16, 128, 64), (bf16, 128, 128)]
    shapes += [(bf16, 256, 16), (bf16, 256, 32), (bf16, 256, 64), (fp32, 64, 16), (fp32, 256, 16)]
    for dtype, dim, rows in shapes:
        for masked in (False, True):
            quick = dtype == bf16 and not masked and (dim, rows) == (128, 64)
            yield _attention(dtype, dim, rows, masked, hip, quick=quick)
    ones = {"nodes": 1, "kv_heads": 1, "group": 1, "tree_rows": 1}
    yield _changed(_attention(bf16, 64, 16, False, hip), "attention of one node and head", ones)
    # Head sizes 80, 96 and 112 are padded to 128.
    for rows, masked in ((32, True), (64, False)):
        build = _attention(bf16, 128, rows, masked, hip)
        yield _changed(build, build.name.replace("size 128", "sizes 80 to 112"), {"EVEN": False})
    for splits, dim in ((2, 64), (32, 128), (64, 256)):
        yield Build(
            f"attention: merge of {splits} splits, head size {dim}",
            tree_attention_triton._merge_kernel,
            {"SPLITS": splits, "DIM": dim},
            quick=splits == 32,
            types={"out_ptr": "*bf16"},
        )


def _name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _changed(build: Build, name: str, constants: dict[str, int | bool]) -> Build:
    return replace(build, name=name, constants=build.constants | constants)


def _attention(
    dtype: torch.dtype, dim: int, rows: int, masked: bool, hip: bool, quick: bool = False
) -> Build:
    tiling = tree_attention_triton.tiles(rows, dim, dtype, hip=hip)
    return Build(
        f"attention {_name(dtype)}, head size {dim}, {rows} rows{', window and cap' * masked}",
        tree_attention_triton._split_kernel,
        {
            "ROWS": tiling.rows,
            "KEYS": tiling.keys,
            "DIM": dim,
            "EVEN": True,
            "WINDOW": masked,
            "SOFTCAP": masked,
            "STAGES": tiling.stages,
            "query_stride_dim": 1,
            "key_stride_dim": 1,
            "value_stride_dim": 1,
        },
        dtype,
        tiling.warps,
        fp32_out=True,
        quick=quick,
    )


def compile_build(build: Build, arch: str) -> tuple[Any, Resources]:
    """The compiled kernel and what it takes."""
    cuda = arch.isdigit()
    missing = {p.name for p in build.kernel.params if p.is_constexpr} - build.constants.keys()
    assert not missing, f"{build.name} lacks {missing}"
    signature: dict[str, str] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(build.kernel.arg_names):
        signature[name] = "constexpr" if name in build.constants else _type(build, name)
        if name not in build.constants and (name.endswith("_ptr") or "stride" in name or name in _ALIGNED):
            aligned[(i,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", int(arch), 32) if cuda else GPUTarget("hip", arch, 64)
    source = ASTSource(fn=build.kernel, signature=signature, constexprs=build.constants, attrs=aligned)
    binary = triton.compile(source, target=target, options={"num_warps": build.warps})
    registers, stack = _cuda_usage(binary.asm["cubin"]) if cuda else _amd_usage(binary.asm["amdgcn"])
    return binary, Resources(binary.metadata.shared, registers, stack)


def _type(build: Build, name: str) -> str:
    if name in build.types:
        return build.types[name]
    if name in _MODEL_POINTERS:
        return _TYPES[build.dtype]
    if name in _FP32_POINTERS or (name == "out_ptr" and build.fp32_out):
        return "*fp32"
    if name == "allowed_ptr":
        return "*i32"
    if name.endswith("_ptr"):
        return "*i64"
    return "fp32" if name in ("scale", "softcap") else "i32"


def _cuda_usage(cubin: bytes) -> tuple[int | None, int | None]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, RuntimeError, subprocess.CalledProcessError):
            return None, None
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    return (int(found[1]), int(found[2])) if found else (None, None)


def _amd_usage(assembly: str) -> tuple[int | None, int | None]:
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    stack = re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    return (int(registers[1]) if registers else None, int(stack[1]) if stack else None)


def report(architectures: tuple[str, ...] = ARCHITECTURES) -> str:
    """A Markdown table of every build on every architecture: registers / stack bytes / shared KiB."""
    rows: dict[str, dict[str, Resources]] = {}
    for arch in architectures:
        for build in builds(arch):
            rows.setdefault(build.name, {})[arch] = compile_build(build, arch)[1]
    lines = [
        "Registers a thread / bytes of stack a thread / KiB of shared memory a program; triton "
        f"{triton.__version__}.",
        "Written by `python -m kernels.ahead_of_time --report kernels/RESOURCES.md`.",
        "",
        "| build | " + " | ".join(a if a.startswith("gfx") else f"sm_{a}" for a in architectures) + " |",
        "|---|" + "---|" * len(architectures),
    ]
    for name, by_arch in rows.items():
        cells = (by_arch[a] for a in architectures)
        lines.append(
            f"| {name} | "
            + " | ".join(f"{c.registers} / {c.stack} / {c.shared / 1024:.0f}" for c in cells)
            + " |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every kernel without a GPU.")
    parser.add_argument("architectures", nargs="*", default=ARCHITECTURES, metavar="arch")
    parser.add_argument("--report", type=Path, help="write the table here instead of printing it")
    arguments = parser.parse_args()
    table = report(tuple(arguments.architectures))
    if arguments.report is None:
        sys.stdout.write(table)
    else:
        arguments.report.write_text(table)


if __name__ == "__main__":
    main()
