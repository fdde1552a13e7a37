"""What the kernels take, beside PyTorch's own and beside the time that their bytes take.

Times are medians of graph replays. A replay of attention runs it once on each of several layers, whose caches
together are larger than the GPU's own cache, as they are in a model."""

from __future__ import annotations

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import CUDA, DEVICE
from benchmarks.gpu.inputs import AttentionInputs, Verification, normal
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.size import Size
from kernels.accept_triton import accept_states_triton, accept_tree_triton
from kernels.compact_triton import compact_triton
from kernels.draft_topk_triton import draft_topk_triton
from kernels.tree_attention_triton import Tiles, tree_attention_triton

GOAL = 0.7
"""Share of the copy bandwidth that attention is to reach at batch 8 and prefix 8k."""

_QUEUED_IN_CYCLES = 10_000_000
"""Of the GPU's clock: some 5 ms, in which all replays are queued many times over."""

_BACKENDS = {
    "sdpa efficient": (SDPBackend.EFFICIENT_ATTENTION, True),
    "sdpa cudnn": (SDPBackend.CUDNN_ATTENTION, True),
    "flash, no tree": (SDPBackend.FLASH_ATTENTION, False),
}
"""PyTorch's kernels, and whether they are given the tree's mask: flash attention takes none."""


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of ``run``, as a graph on a GPU.

    The GPU sleeps until all replays are queued, so that the time to launch them is in none, however short
    they are.
    """
    if not CUDA:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    moments = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    graph.replay()
    graph.replay()
    torch.cuda._sleep(_QUEUED_IN_CYCLES)
    moments[0].record()
    for moment in moments[1:]:
        graph.replay()
        moment.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(moments)) / 1e3


@torch.inference_mode()
def measure_bandwidth(report: Report, size: Size) -> None:
    """Bytes read and written a second by a copy."""
    source = torch.zeros(size.copied, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    moved = 2 * size.copied / seconds(partial(target.copy_, source), size.repeats)
    report.machine["copy_gb_per_s"] = moved / 1e9


def _floor(report: Report, moved: int) -> float:
    """Seconds that so many bytes take; NaN where the bandwidth is not known."""
    return moved / 1e9 / report.machine.get("copy_gb_per_s", math.nan)


@torch.inference_mode()
def time_attention(report: Report, size: Size) -> None:
    storage = AttentionInputs.storage(size)
    for prefix, batch, nodes in itertools.product(size.prefixes, size.batches, size.timed_nodes):
        name = f"time of attention: batch {batch}, prefix {prefix}, {nodes} nodes"
        with report.attempt(name):
            inputs = AttentionInputs.make(size, storage, batch, prefix, nodes)
            _time_attention(report, size, inputs, prefix)


def _time_attention(report: Report, size: Size, inputs: AttentionInputs, prefix: int) -> None:
    batch, _, nodes, _ = inputs.query.shape
    taken = seconds(partial(_kernel, inputs, size.model.scale), size.repeats) / inputs.layers
    floor = _floor(report, inputs.bytes)
    row: Row = {
        "batch": batch,
        "prefix": prefix,
        "nodes": nodes,
        "layers": inputs.layers,
        "us": taken * 1e6,
        "floor us": floor * 1e6,
        "of bandwidth": floor / taken,
    }
    report.attention.append(row)
    if (batch, prefix) == (8, 8192):
        name = f"goal: {GOAL:.0%} of the copy bandwidth at batch 8, prefix 8k, {nodes} nodes"
        report.check(name, floor / taken >= GOAL, f"{floor / taken:.0%}")
    row |= dict.fromkeys(_BACKENDS)
    for name, (backend, masked) in _BACKENDS.items():
        row[name] = _sdpa_microseconds(inputs, backend, masked, size)


def _kernel(
    inputs: AttentionInputs, scale: float, tiling: Tiles | None = None, splits: int | None = None
) -> None:
    for keys, values in zip(*inputs.cache, strict=True):
        tree_attention_triton(
            inputs.query,
            keys,
            values,
            inputs.slots,
            inputs.lengths,
            inputs.words,
            scale,
            tiling=tiling,
            splits=splits,
        )


def _sdpa_microseconds(
    inputs: AttentionInputs, backend: SDPBackend, masked: bool, size: Size
) -> float | None:
    """Microseconds a layer; None where PyTorch has no such kernel for these inputs."""
    batch, heads, nodes, dim = inputs.query.shape
    kv_heads = size.model.kv_heads
    group = heads // kv_heads
    # The heads of a group as rows, so that no backend repeats keys.
    query = inputs.query.reshape(batch, kv_heads, group * nodes, dim)
    mask = inputs.bias(group) if masked else None

    def run() -> None:
        for keys, values in zip(*inputs.cache, strict=True):
            F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=size.model.scale)

    try:
        with warnings.catch_warnings(), sdpa_kernel(backend):
            warnings.simplefilter("ignore")
            return seconds(run, size.repeats) / inputs.layers * 1e6
    except RuntimeError:
        return None


@torch.inference_mode()
def time_others(report: Report, size: Size) -> None:
    """The other kernels; the LM head in one launch with accept, and before it.

    Logits lie in the GPU's own cache, where the LM head leaves them, so that accept alone may beat the copy.
    """
    weight = normal(size.model.vocab, size.model.hidden, dtype=size.dtype) / math.sqrt(size.model.hidden)

    def add(name: str, shape: str, run: Callable[[], object], moved: int) -> None:
        with report.attempt(f"time of {name}, {shape}"):
            taken, floor = seconds(run, size.repeats), _floor(report, moved)
            row = {"name": name, "shape": shape, "us": taken * 1e6}
            report.kernels.append(row | {"floor us": floor * 1e6, "of bandwidth": floor / taken})

    for batch in size.batches:
        with report.attempt(f"inputs of batch {batch}"):
            _add_acceptance(add, size, batch, weight)
            _add_draft(add, size, batch)
            _add_compaction(add, size, batch)


def _add_acceptance(add: Callable[..., None], size: Size, batch: int, weight: Tensor) -> None:
    case = Verification.random(batch, size.nodes)
    tokens = torch.zeros_like(case.parents)
    states = normal(batch, size.nodes, size.model.hidden, dtype=size.dtype)
    logits = F.linear(states, weight)
    shape = f"batch {batch}, {size.nodes} nodes"
    accept = partial(accept_tree_triton, logits, tokens, *case.keys)
    add("accept", shape, accept, _bytes(logits))
    add("accept, filters", shape, partial(accept, filters=case.filters), _bytes(logits))
    apart = partial(_head_then_accept, states, weight, tokens, case)
    add("LM head, then accept", shape, apart, _bytes(weight))
    fused = partial(accept_states_triton, states, weight, tokens, *case.keys)
    add("LM head fused with accept", shape, fused, _bytes(weight))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _head_then_accept(states: Tensor, weight: Tensor, tokens: Tensor, case: Verification) -> None:
    accept_tree_triton(F.linear(states, weight), tokens, *case.keys)


def _add_draft(add: Callable[..., None], size: Size, batch: int) -> None:
    rows = torch.arange(8 * batch, device=DEVICE)
    logits = normal(8 * batch, size.model.draft_vocab, dtype=size.dtype)
    ids = torch.arange(size.model.draft_vocab, device=DEVICE)
    half = torch.full((8 * batch,), 0.5, device=DEVICE)
    run = partial(draft_topk_triton, logits, torch.zeros_like(half), 8, target_ids=ids)
    noise = {"temperature": half, "strength": half, "positions": rows, "seed": rows, "sample": rows}
    add("draft top-k", f"batch {batch}, 8 nodes", run, _bytes(logits))
    add("draft top-k, noise", f"batch {batch}, 8 nodes", partial(run, **noise), _bytes(logits))


def _add_compaction(add: Callable[..., None], size: Size, batch: int) -> None:
    model, accepted = size.model, 5
    cache = normal(2, model.layers, batch, model.kv_heads, 128, model.head_dim, dtype=size.dtype)
    run = partial(
        compact_triton,
        cache,
        torch.arange(batch, device=DEVICE),
        torch.full((batch,), 64, device=DEVICE),
        2 * torch.arange(accepted, device=DEVICE).expand(batch, -1),
        torch.full((batch,), accepted, device=DEVICE),
    )
    moved = 2 * (accepted - 1) * _bytes(cache) // cache.shape[4]
    add(f"compact, {accepted} accepted", f"batch {batch}, {model.layers} layers", run, moved)


@torch.inference_mode()
def time_tilings(report: Report, size: Size) -> None:
    """Attention with other tilings and splits, at the middle one of the shapes."""
    batch, prefix = (sorted(values)[len(values) // 2] for values in (size.batches, size.prefixes))
    storage = AttentionInputs.storage(size)
    group = size.model.heads // size.model.kv_heads
    for nodes in size.timed_nodes:
        inputs = AttentionInputs.make(size, storage, batch, prefix, nodes)
        block = min(128, max(16, 1 << (group * nodes - 1).bit_length()))
        for keys, warps, stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4)):
            tiling = Tiles(block, keys, warps, stages)
            for splits in (None, 2, 4, 8):
                run = partial(_kernel, inputs, size.model.scale, tiling, splits)
                try:
                    taken = seconds(run, size.repeats) / inputs.layers
                except Exception:  # what does not fit fails in many ways
                    break
                report.tilings.append(
                    {"nodes": nodes, **tiling._asdict(), "splits": splits, "us": taken * 1e6}
                )
