"""Ops for decoding on CPUs, compiled on first use by the machine's own C++ compiler.

``load_ops`` first; then ``torch.ops.eagle_cpu`` has

    linear(x [..., K], packed, bias [N] | None, N) -> [..., N]
    attend(q [1, Hq, M, D], k and v [1, Hkv, M, D], places int64 [M, 4], cache int64 [5], layer, scale,
           window, softcap) -> [1, M, Hq, D]
    linear_argmax(x [M, K], packed, bias [N] | None, N) -> a list of M, argmax of linear, which is not kept
    linear_draw(x, packed, bias, N, temperature, seed, sample (lists of M or 1), position (list of M)) ->
           draw's likewise
    compact(cache, slots, lengths, counts, paths (lists)): see kernels/compact.py
    take_rows(x [N, w], rows (a list of M)) -> [M, w]
    argmax([..., V]) -> int64 [...], the first of equal ones
    draw(logits [M, V], temperature fp32 [M], seed, sample and position int64 [M], floor fp32 [M] | None)
           -> int64 [M]: the target's own tokens, see kernels/accept.py; -1 where two are so near that fp32
           rounding decides
    filter_floor(logits [M, V], temperature fp32 [M], top_k int64 [M], top_p and log min_p fp32 [M]) -> fp32
           [M]: see kernels/filters.py; NaN where the rounding of sums could decide
    rank(logits [R, Vd], ids int64 [Vd], temperature, strength, seed, sample, position (lists of R), pool,
         width) -> the best children of R nodes, see stages/decoding/drafters/ranking.py
    likelihoods(log_probs fp32 [P], noise fp32 [P], token, strengths, factors) -> float64 [S, A]: see
           stages/decoding/drafters/strength.py
    norm(x [..., h], weight [h], eps, kind) -> [..., h], root-mean-square norm; kinds as in CpuLayers
    layers(stack, x [M, h], ...) -> [M, h]: whole decoder layers of Llama's kind, see
           stages/targets/cpu_layers.py
    decode(decoder, tokens int64 [M], ...) -> [M, h], [M, taps * h] and, if asked for, a list of M tokens: a
           whole target, see stages/targets/cpu_layers.py
    pack_coarsely(weight [N, K]) -> bytes, coarse_linear(x [M, K], packed, bias, N) -> [M, N]: in 8 bits
    head_fuse, head_pass, head_logits, head_feedback: an EAGLE head's steps, see stages/heads/cpu_head.py
    draft, learn: a whole drafting cycle, see stages/decoding/drafters/one_op.py

and ``torch.classes.eagle_cpu`` what these keep from call to call: ``Layers``, ``Decoder`` and ``Head``.

All are deterministic row by row: a row's result has the same bits whatever other rows are computed with it.

``places`` says of each row: its slot (below 0: padding), the cache row its key and value go to, the stable
prefix it sees, and its ancestor word (bit j: it sees row prefix + j too). ``cache`` is where the keys and the
values begin (addresses) and the strides of layers, slots and heads in elements.

Cost of ``linear``, M rows: 2 N K bytes of weights read once, M N K multiply-adds; reading is the floor up to
some 12 rows on two cores with AVX512-BF16, far beyond with AMX, 16 rows at a time. ``attend`` over n keys:
4 n D bytes read and 2 n D multiply-adds for each row and query head; with AMX 16 query heads of one slot read
them together, and what remains is e^x, n for each. ``draw`` reads the
logits once and calls Philox for a fourth of the tokens that are within the noise's reach; logarithms are
taken of a few dozen.
"""

from __future__ import annotations

from kernels.cpu.build import load_ops, ops_loaded
from kernels.cpu.linear import DTYPES, Drawing, PackedLinear, pack_linears

__all__ = ["DTYPES", "Drawing", "PackedLinear", "load_ops", "ops_loaded", "pack_linears"]
