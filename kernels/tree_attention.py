"""Attention of draft-tree nodes to a KV cache: the shared prefix, and each node's own ancestors.

    out[b, h, i] = sum_k softmax_k(cap(scale * q[b, h, i] . K[k])) V[k],   cap(s) = c * tanh(s / c) or s

over the rows k of sequence b's slot that node i may see: the prefix 0 .. length-1, and length + j for every
bit j set in the node's ancestor word (bit j = node j is an ancestor of i, or i itself). Node j sits in row
length + j, at position length + depth(j). A parent precedes its children, so the set bits of a word are the
path from the root in order: depth(i) is their number less one, and from node i to its ancestor j there are as
many levels as bits set above j. A sliding window counts positions, not rows. A word of 0 marks padding, whose
output is zero.

Cost a sequence and layer, with E bytes an element, G = Hq / Hkv:
    cache read       2 * E * Hkv * (length + N) * D bytes, once for all N nodes and all G heads of a group
    query and output 2 * E * Hq * N * D bytes
    operations       4 * Hq * N * (length + N) * D, and Hq * N * (length + N) exponentials
so 2 * G * N / E operations a byte of cache: 64 for Llama-3.1-8B at 16 nodes in bf16. Matrix units have room
for some 200 to 600 operations a byte of memory bandwidth, so the bytes bound it up to about 64 nodes.

Source: SpecInfer (Miao et al., arXiv 2305.09781) for tree attention; FlashDecoding for the split over keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import use_triton

MAX_NODES = 64


def node_depths(ancestors: Tensor) -> Tensor:
    """Depth of each node: int64 [..., N] from ancestor words [..., N]; the root has 0 and padding -1."""
    bits = torch.arange(MAX_NODES, device=ancestors.device)
    return ((ancestors.unsqueeze(-1) >> bits) & 1).sum(-1) - 1


def tree_mask(lengths: Tensor, ancestors: Tensor, size: int, sliding_window: int | None = None) -> Tensor:
    """Which cache rows each node sees.

    Args:
        lengths: int64 [B], rows of the stable prefix.
        ancestors: int64 [B, N], ancestor words, N <= 64.
        size: cache rows covered; at least max(lengths) + N for nothing to be cut off.
        sliding_window: a node at position p sees positions above p - sliding_window only.

    Returns:
        bool [B, 1, N, size], True where visible.
    """
    # The node a row belongs to, negative in the prefix.
    node = torch.arange(size, device=lengths.device) - lengths[:, None]  # [B, size]
    bits = torch.arange(MAX_NODES, device=ancestors.device)
    path = ((ancestors.unsqueeze(-1) >> bits) & 1).bool()  # [B, N, 64]
    seen = path
    if sliding_window is not None:
        levels = path.flip(-1).cumsum(-1).flip(-1)  # bits set from j on: levels down to the node, and one
        seen = path & (levels <= sliding_window)
    tree = seen.gather(2, node.clamp(0, MAX_NODES - 1).unsqueeze(1).expand(-1, path.shape[1], -1))
    tree = tree & ((node >= 0) & (node < MAX_NODES)).unsqueeze(1)
    prefix = (node < 0).unsqueeze(1) & path.any(-1, keepdim=True)
    if sliding_window is not None:
        prefix = prefix & (node_depths(ancestors).unsqueeze(-1) - node.unsqueeze(1) < sliding_window)
    return (tree | prefix).unsqueeze(1)


def _rows(cache: Tensor, slots: Tensor | slice, size: int) -> Tensor:
    """The first `size` rows of the given slots: a view of a slice, else a copy."""
    cache = cache[:, :, :size]
    return cache[slots] if isinstance(slots, slice) else cache.index_select(0, slots)


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor | slice,
    lengths: Tensor,
    ancestors: Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree_rows: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attend from every node of every sequence's tree.

    Args:
        query: [B, Hq, N, D], N <= 64.
        key_cache: [slots, Hkv, S, D], any strides, the nodes' own rows written; value_cache likewise.
        slots: int64 [B], each sequence's slot, or a slice of B slots.
        lengths: int64 [B], rows of each stable prefix.
        ancestors: int64 [B, N], ancestor words.
        scale: factor of the scores.
        sliding_window: see `tree_mask`.
        softcap: bound c of the scores, if any (Gemma 2).
        tree_rows: cache rows of the tree, where the nodes are only some of it (a level that is being drafted
            attends to levels above it). The nodes' own number by default.
        mask: `tree_mask(...)`, to build it once a forward instead of once a layer; rows beyond its size are
            not read. The kernel has no use for it.

    Returns:
        [B, Hq, N, D], the dtype of `query`.
    """
    if use_triton(query):
        from kernels.tree_attention_triton import tree_attention_triton

        return tree_attention_triton(
            query,
            key_cache,
            value_cache,
            slots,
            lengths,
            ancestors,
            scale,
            sliding_window=sliding_window,
            softcap=softcap,
            tree_rows=tree_rows,
        )
    return tree_attention_torch(
        query,
        key_cache,
        value_cache,
        slots,
        lengths,
        ancestors,
        scale,
        sliding_window=sliding_window,
        softcap=softcap,
        tree_rows=tree_rows,
        mask=mask,
    )


def tree_attention_torch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor | slice,
    lengths: Tensor,
    ancestors: Tensor,
    scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    tree_rows: int | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """`tree_attention` in torch."""
    batch, query_heads, nodes, dim = query.shape
    kv_heads = key_cache.shape[1]
    group = query_heads // kv_heads
    if mask is None:
        size = min(int(lengths.max()) + (tree_rows or nodes), key_cache.shape[2])
        mask = tree_mask(lengths, ancestors, size, sliding_window)
    size = mask.shape[-1]
    keys, values = _rows(key_cache, slots, size), _rows(value_cache, slots, size)
    # The heads of a group share their keys: packed as extra rows, they read them once.
    packed = query.reshape(batch, kv_heads, group * nodes, dim)
    visible = mask.unsqueeze(2).expand(-1, -1, group, -1, -1).reshape(batch, 1, group * nodes, size)
    if softcap is None:
        out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=visible, scale=scale)
    else:
        scores = softcap * torch.tanh((packed @ keys.transpose(-1, -2)).float() * (scale / softcap))
        weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
        out = weights.nan_to_num(0.0).to(values.dtype) @ values
    return out.reshape(batch, query_heads, nodes, dim)
