"""How much a run checks and times: Llama-3.1-8B's shapes on a GPU, tiny ones in the interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Model:
    """Shapes of a target, and of its draft vocabulary."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Case:
    """One comparison of attention with float64."""

    batch: int = 2
    prefix: int = 1500
    nodes: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        shape = f"{str(self.dtype)[6:]} {self.batch} x {self.prefix} + {self.nodes}"
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        masks = f"{', window ' + str(self.window) if self.window else ''}{', capped' if self.softcap else ''}"
        return f"{shape}, {heads}{masks}"


@dataclass(frozen=True)
class Size:
    """All that a run does.

    nodes: of a tree, in checks and the first of the timed shapes. batches, prefixes, timed_nodes: every
    combination is timed. repeats: times a graph is replayed; the median counts. overflow: bytes that the
    caches of the timed layers have together at least, several times the GPU's own cache. copied: bytes copied
    to measure the bandwidth. prompt, output: tokens of the engine's run."""

    model: Model
    dtype: torch.dtype
    cases: tuple[Case, ...]
    nodes: int
    batches: tuple[int, ...]
    prefixes: tuple[int, ...]
    timed_nodes: tuple[int, ...]
    repeats: int
    overflow: int
    copied: int
    prompt: int
    output: int
    engine_batches: tuple[int, ...]


FULL = Size(
    model=Model(
        layers=32,
        hidden=4096,
        inner=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=128_256,
        draft_vocab=32_000,
    ),
    dtype=torch.bfloat16,
    cases=(
        Case(),
        Case(batch=8, prefix=3000),
        Case(nodes=1),
        Case(batch=1, nodes=64),
        Case(heads=32, kv_heads=32, dtype=torch.float16),
        Case(heads=9, kv_heads=3, head_dim=64, dtype=torch.float32, prefix=700),
        Case(heads=9, kv_heads=3, head_dim=64),
        Case(heads=24, kv_heads=8, head_dim=96),
        Case(heads=16, kv_heads=8, head_dim=256, window=512, softcap=50.0),
        Case(heads=8, kv_heads=1, nodes=60, window=40),
        Case(batch=3, prefix=0),
    ),
    nodes=16,
    batches=(1, 8, 32),
    prefixes=(1024, 8192, 32768),
    timed_nodes=(16, 32),
    repeats=10,
    overflow=256 << 20,
    copied=1 << 30,
    prompt=512,
    output=128,
    engine_batches=(1, 8),
)

SMALL = Size(
    model=Model(layers=2, hidden=64, inner=96, heads=4, kv_heads=2, head_dim=16, vocab=1100, draft_vocab=300),
    dtype=torch.float32,
    cases=(
        Case(2, 40, 5, 4, 2, 16, torch.float32),
        Case(2, 30, 5, 3, 1, 20, torch.float32, window=9, softcap=5.0),
        Case(2, 0, 5, 2, 2, 16, torch.float32),
    ),
    nodes=4,
    batches=(1, 2),
    prefixes=(24,),
    timed_nodes=(4,),
    repeats=1,
    overflow=0,
    copied=1 << 20,
    prompt=8,
    output=12,
    engine_batches=(1, 2),
)
