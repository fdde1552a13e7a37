"""A cycle of all kernels in their order: no wait for the GPU, and as a graph the same results."""

from __future__ import annotations

import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import CUDA, DEVICE
from benchmarks.gpu.inputs import Verification, ancestor_words, normal
from benchmarks.gpu.report import Report
from benchmarks.gpu.size import Size
from benchmarks.gpu.times import seconds
from kernels.accept_triton import accept_tree_triton
from kernels.compact_triton import compact_triton
from kernels.draft_topk_triton import draft_topk_triton
from kernels.tree_attention_triton import tree_attention_triton

_LEVELS = 5


class Cycle:
    """Five levels drafted, attention of every layer, the LM head, acceptance, compaction; batch 1."""

    def __init__(self, size: Size) -> None:
        model, nodes, prefix = size.model, size.nodes, size.prefixes[0]
        self.scale = model.scale
        self.case = Verification.random(1, nodes)
        self.words = ancestor_words(self.case.trees)
        shape = (2, model.layers, 1, model.kv_heads, prefix + nodes, model.head_dim)
        self.cache = normal(*shape, dtype=size.dtype)
        self.query = normal(1, model.heads, nodes, model.head_dim, dtype=size.dtype)
        self.states = normal(1, nodes, model.hidden, dtype=size.dtype)
        self.weight = normal(model.vocab, model.hidden, dtype=size.dtype) / math.sqrt(model.hidden)
        self.draft = normal(8, model.draft_vocab, dtype=size.dtype)
        self.ids = torch.arange(model.draft_vocab, device=DEVICE)
        self.scores = torch.zeros(8, device=DEVICE)
        self.slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self.lengths = torch.full((1,), prefix, device=DEVICE)
        logits = F.linear(self.states, self.weight)
        drawn = accept_tree_triton(logits, torch.zeros_like(self.words), *self.case.keys).drawn
        self.tokens = drawn.gather(1, self.case.parents.clamp(min=0))  # each what its parent draws

    def run(self) -> tuple[Tensor, ...]:
        """Tokens drafted, the last layer's output, the accepted path, its length and the bonus token."""
        for _ in range(_LEVELS):
            best = draft_topk_triton(self.draft, self.scores, 8, target_ids=self.ids)
        place = (self.slots, self.lengths, self.words)
        for keys, values in zip(*self.cache, strict=True):
            out = tree_attention_triton(self.query, keys, values, *place, self.scale)
        logits = F.linear(self.states, self.weight)
        accepted = accept_tree_triton(logits, self.tokens, *self.case.keys)
        compact_triton(self.cache, self.slots, self.lengths, accepted.path, accepted.count)
        return best.token, out, accepted.path, accepted.count, accepted.token


@torch.inference_mode()
def run_cycle(report: Report, size: Size) -> None:
    cycle = Cycle(size)
    before = cycle.cache.clone()
    expected = [t.clone() for t in cycle.run()]  # compiles
    moved = cycle.cache.clone()
    report.check("cycle: accepts", int(expected[3]) > 1, f"{int(expected[3])} nodes")
    if not CUDA:
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    start = time.perf_counter()
    try:
        cycle.run()
        waited = ""
    except RuntimeError as error:
        waited = str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    launched = time.perf_counter() - start
    report.check("cycle: never waits for the GPU", not waited, waited or "no synchronisation")

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cycle.run()
    cycle.cache.copy_(before)
    graph.replay()
    same = all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
    same &= torch.equal(cycle.cache, moved)
    report.check("cycle: its graph gives the same results", same, "equal" if same else "different")
    report.cycle = {"graph us": seconds(cycle.run, size.repeats) * 1e6, "launching us": launched * 1e6}
