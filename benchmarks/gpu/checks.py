"""Each kernel against float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.gpu import DEVICE
from benchmarks.gpu.float64 import attention64, gumbel64
from benchmarks.gpu.inputs import MIN_P, TOP_K, TOP_P, Verification, ancestor_words, normal, random_trees
from benchmarks.gpu.report import Report
from benchmarks.gpu.size import Case, Size
from kernels.accept import Acceptance
from kernels.accept_triton import accept_states_triton, accept_tree_triton
from kernels.compact_triton import compact_triton
from kernels.draft_topk_triton import draft_topk_triton
from kernels.filters_triton import filter_floor_triton
from kernels.noise_triton import gumbel_noise_vocab_triton
from kernels.tree_attention_triton import tree_attention_triton

_BOUNDS = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@torch.inference_mode()
def check_attention(report: Report, size: Size) -> None:
    for case in size.cases:
        with report.attempt(f"attention, {case}"):
            _check_attention(report, case)


def _check_attention(report: Report, case: Case) -> None:
    generator = torch.Generator().manual_seed(1)
    trees = random_trees(case.batch, case.nodes, seed=case.nodes)
    # One prefix much shorter than the others.
    lengths = [case.prefix // 3 if b == 1 else max(0, case.prefix - 37 * b) for b in range(case.batch)]
    slots = torch.randperm(case.batch + 1, generator=generator)[: case.batch].tolist()
    rows = case.prefix + case.nodes
    keys, values = normal(2, case.batch + 1, case.kv_heads, rows, case.head_dim, dtype=case.dtype)
    query = normal(case.batch, case.nodes, case.heads, case.head_dim, dtype=case.dtype, seed=1)
    query, scale = query.transpose(1, 2), case.head_dim**-0.5
    exact = attention64(query, keys, values, slots, lengths, trees, scale, case.window, case.softcap)
    error = 0.0
    for splits in (None, 1, 3):
        out = tree_attention_triton(
            query,
            keys,
            values,
            torch.tensor(slots, device=DEVICE),
            torch.tensor(lengths, device=DEVICE),
            ancestor_words(trees),
            scale,
            sliding_window=case.window,
            softcap=case.softcap,
            splits=splits,
        )
        error = max(error, _error(out, exact))
    report.check(f"attention, {case}", error < _BOUNDS[case.dtype], f"largest error {error:.1e}")


def _error(found: Tensor, exact: Tensor) -> float:
    """Largest absolute difference; infinite for NaN."""
    error = float((found.double() - exact).abs().max())
    return math.inf if math.isnan(error) else error


@torch.inference_mode()
def check_acceptance(report: Report, size: Size) -> None:
    model, case = size.model, Verification.random(2, size.nodes)
    with report.attempt("noise"):
        exact = gumbel64(case.seed, case.sample, case.positions[:, 0], model.vocab)
        noise = gumbel_noise_vocab_triton(case.seed, case.sample, case.positions[:, 0], model.vocab)
        error = _error(noise, exact)
        report.check("noise", error < 1e-5, f"largest error {error:.1e}")

    logits = (3 * normal(2, size.nodes, model.vocab, dtype=torch.float32)).to(size.dtype)
    scores = case.scores(logits)
    tokens = _tokens_half_right(case, scores.argmax(-1), model.vocab)
    with report.attempt("acceptance"):
        result = accept_tree_triton(logits, tokens, *case.keys)
        _check_draws(report, "acceptance: draws", result.drawn, scores, 1e-4)
        _check_walk(report, case, tokens, result)
    with report.attempt("filters"):
        floor = filter_floor_triton(logits, case.temperature, case.filters)
        _check_filters(report, case, logits, floor)
        heat = torch.where(case.temperature > 0, case.temperature, 1.0)[:, None, None]
        ruled_out = logits.float() / heat < floor.unsqueeze(-1)
        result = accept_tree_triton(logits, tokens, *case.keys, filters=case.filters)
        kept = scores.masked_fill(ruled_out, -math.inf)
        _check_draws(report, "acceptance: draws of what the filters keep", result.drawn, kept, 1e-4)
    with report.attempt("acceptance with the LM head"):
        states = normal(2, size.nodes, model.hidden, dtype=size.dtype, seed=3)
        weight = normal(model.vocab, model.hidden, dtype=size.dtype, seed=4)
        weight = weight * (3 / math.sqrt(model.hidden))
        exact = torch.cat([states.double() @ part.double().T for part in weight.split(1 << 14)], -1)
        result = accept_states_triton(states, weight, tokens, *case.keys)
        _check_draws(report, "acceptance with the LM head: draws", result.drawn, case.scores(exact), 1e-3)


def _check_walk(report: Report, case: Verification, tokens: Tensor, result: Acceptance) -> None:
    walks = [
        _walk(t, n, d) for t, n, d in zip(case.trees, tokens.tolist(), result.drawn.tolist(), strict=True)
    ]
    right = [path[: len(walk)] == walk for path, walk in zip(result.path.tolist(), walks, strict=True)]
    right += [result.count.tolist() == [len(walk) for walk in walks]]
    right += [result.token.tolist() == [int(result.drawn[b, walk[-1]]) for b, walk in enumerate(walks)]]
    report.check("acceptance: walk", all(right), f"{result.count.tolist()} nodes")


def _tokens_half_right(case: Verification, drawn: Tensor, vocab: int) -> Tensor:
    """A first child at an odd place holds what its parent draws; all others hold ids of their own."""
    tokens = vocab + torch.arange(drawn.shape[1], device=DEVICE).expand_as(drawn).clone()
    for b, tree in enumerate(case.trees):
        for i, parent in enumerate(tree):
            if i % 2 and parent >= 0 and parent not in tree[:i]:
                tokens[b, i] = drawn[b, parent]
    return tokens


def _walk(tree: list[int], tokens: list[int], drawn: list[int]) -> list[int]:
    path = [0]
    for i in range(1, len(tree)):
        if tree[i] == path[-1] and tokens[i] == drawn[path[-1]]:
            path.append(i)
    return path


def _check_draws(report: Report, name: str, drawn: Tensor, scores: Tensor, bound: float) -> None:
    """A draw is right if none scores higher by more than rounding explains."""
    lost = scores.amax(-1) - scores.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)
    ties = int((lost > 0).sum())
    report.check(name, bool((lost <= bound).all()), f"{ties} of {lost.numel()} are near-ties")


def _check_filters(report: Report, case: Verification, logits: Tensor, floor: Tensor) -> None:
    """The mass above the floor falls short of top-p, with the floor it does not, unless min-p cut deeper."""
    hot = case.temperature > 0
    x = logits[hot].double() / case.temperature[hot, None, None].double()
    least = floor[hot].double()
    kth = x.topk(TOP_K, -1).values[..., -1]
    mass = x.masked_fill(x < kth.unsqueeze(-1), -math.inf).softmax(-1)
    above = mass.masked_fill(x <= least.unsqueeze(-1) + 1e-6, 0.0).sum(-1)
    reached = mass.masked_fill(x < least.unsqueeze(-1) - 1e-6, 0.0).sum(-1)
    cut = x.amax(-1) + math.log(MIN_P)
    right = (above < TOP_P + 1e-5) & (least >= kth - 1e-6) & (least >= cut - 1e-5)
    right &= (reached > TOP_P - 1e-5) | (least <= cut + 1e-5)
    passed = bool(right.all()) and bool((floor[~hot] == -math.inf).all())
    kept = (x >= least.unsqueeze(-1) - 1e-6).sum(-1)
    report.check("filters", passed, f"{int(kept.min())} to {int(kept.max())} tokens kept")


@torch.inference_mode()
def check_draft(report: Report, size: Size) -> None:
    model, nodes, k = size.model, 3, 8
    logits = (3 * normal(nodes, model.draft_vocab, dtype=torch.float32)).to(size.dtype)
    ids = torch.randperm(model.vocab, device=DEVICE)[: model.draft_vocab].sort().values
    scores, rows = -torch.rand(nodes, device=DEVICE), torch.arange(nodes, device=DEVICE)
    best = draft_topk_triton(
        logits,
        scores,
        k,
        target_ids=ids,
        temperature=torch.full((nodes,), 0.7, device=DEVICE),
        strength=torch.full((nodes,), 0.5, device=DEVICE),
        positions=rows,
        seed=rows,
        sample=rows,
    )
    z = logits.double() / 0.7 + 0.5 * gumbel64(rows, rows, rows + 1, model.vocab)[:, ids]
    log_q = scores.double()[:, None] + z.log_softmax(-1)
    error = max(
        _error(best.score, log_q.topk(k, -1).values), _error(best.score, log_q.gather(1, best.draft_id))
    )
    report.check(
        "draft top-k",
        error < 1e-4 and torch.equal(best.token, ids[best.draft_id]),
        f"largest error {error:.1e}",
    )


@torch.inference_mode()
def check_compaction(report: Report, size: Size) -> None:
    model, batch, nodes, length = size.model, 2, 24, 50
    cache = normal(2, 2, batch + 1, model.kv_heads, length + nodes, model.head_dim, dtype=size.dtype)
    paths = [sorted({0, *torch.randperm(nodes)[: nodes * 2 // 3].tolist()}) for _ in range(batch)]
    expected = cache.clone()
    for b, path in enumerate(paths):
        for row, node in enumerate(path):
            expected[:, :, b + 1, :, length + row] = cache[:, :, b + 1, :, length + node]
    compact_triton(
        cache,
        torch.arange(1, batch + 1, device=DEVICE),
        torch.full((batch,), length, device=DEVICE),
        torch.tensor([path + [-1] * (nodes - len(path)) for path in paths], device=DEVICE),
        torch.tensor([len(path) for path in paths], device=DEVICE),
    )
    report.check("compaction", torch.equal(cache, expected), f"{[len(p) for p in paths]} rows")
