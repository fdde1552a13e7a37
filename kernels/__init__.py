"""Triton kernels, each beside its torch reference; importing needs neither triton nor a GPU."""

from __future__ import annotations

from kernels.accept import Acceptance, accept_states, accept_tree, draw_tokens, first_argmax
from kernels.compact import compact, compact_paths
from kernels.draft_topk import DraftTopK, draft_topk
from kernels.filters import Filters, allowed_tokens, filter_floor
from kernels.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel_noise, gumbel_noise_vocab, philox4x32
from kernels.tree_attention import MAX_NODES, node_depths, tree_attention, tree_mask

__all__ = [
    "GUMBEL_MAX",
    "GUMBEL_MIN",
    "MAX_NODES",
    "Acceptance",
    "DraftTopK",
    "Filters",
    "accept_states",
    "accept_tree",
    "allowed_tokens",
    "compact",
    "compact_paths",
    "draft_topk",
    "draw_tokens",
    "filter_floor",
    "first_argmax",
    "gumbel_noise",
    "gumbel_noise_vocab",
    "node_depths",
    "philox4x32",
    "tree_attention",
    "tree_mask",
]
