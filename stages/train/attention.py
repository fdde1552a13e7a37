"""Attention of the training-time test: a causal prefix shared by all steps, and each query's own later keys.

At draft step i the query at index j of a row attends to the step-0 keys 0 .. j of its row and to one key of
each of the steps 1 .. i at the same index, in one softmax (arXiv 2503.01840, section 3.2):

    out = sum_k P_k v_k,   P = softmax([q . k_0 .. q . k_j, q . own_1 .. q . own_i] / sqrt(D))

With a sliding window of W positions, only keys above position j+i-W count: own key s is at position j+s.

Rows are padded for this operation only, and no scores are kept for the backward: it computes them again,
piece by piece, so that memory is linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SCORES_AT_ONCE = 1 << 21
"""Most attention scores in memory at a time (with one query of each row as the least piece)."""

PADDING = 0.3
"""Most padding in a group, as a share of its scores."""

_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class RowGroup:
    """Rows of similar length, attended together. K and M are the longest row's keys and queries."""

    keys: Tensor  # [b, K] int64, indices into the batch's keys; any index where padded
    key_index: Tensor  # [b, K] int64, index j in the row; beyond every query where padded
    queries: Tensor  # [b, M] int64, indices into the batch's queries; any index where padded
    query_index: Tensor  # [b, M] int64, index j in the row
    real: Tensor  # [b, M] bool, false where a query is padding

    def to(self, device: torch.device) -> RowGroup:
        return RowGroup(
            self.keys.to(device),
            self.key_index.to(device),
            self.queries.to(device),
            self.query_index.to(device),
            self.real.to(device),
        )


def group_rows(keys: Sequence[int], query_index: Sequence[Tensor]) -> tuple[RowGroup, ...]:
    """Groups consecutive rows as long as little of a group is padding.

    Args:
        keys: keys of each row, in descending order.
        query_index: for each row, its queries' indices j in the row, int64.
    """
    groups: list[RowGroup] = []
    members: list[int] = []
    sizes = [len(index) for index in query_index]
    key_starts, query_starts = _starts(keys), _starts(sizes)

    def waste(rows: list[int]) -> float:
        padded = len(rows) * max(keys[r] for r in rows) * max(sizes[r] for r in rows)
        return 1 - sum(keys[r] * sizes[r] for r in rows) / padded

    def close() -> None:
        longest, most = max(keys[r] for r in members), max(sizes[r] for r in members)
        group = RowGroup(
            keys=torch.zeros(len(members), longest, dtype=torch.int64),
            key_index=torch.full((len(members), longest), _NEVER),
            queries=torch.zeros(len(members), most, dtype=torch.int64),
            query_index=torch.zeros(len(members), most, dtype=torch.int64),
            real=torch.zeros(len(members), most, dtype=torch.bool),
        )
        for b, r in enumerate(members):
            group.keys[b, : keys[r]] = torch.arange(key_starts[r], key_starts[r] + keys[r])
            group.key_index[b, : keys[r]] = torch.arange(keys[r])
            group.queries[b, : sizes[r]] = torch.arange(query_starts[r], query_starts[r] + sizes[r])
            group.query_index[b, : sizes[r]] = query_index[r]
            group.real[b, : sizes[r]] = True
        groups.append(group)

    for row in range(len(keys)):
        if members and waste([*members, row]) > PADDING:
            close()
            members = []
        members.append(row)
    close()
    return tuple(groups)


def every_key(groups: Sequence[RowGroup]) -> tuple[RowGroup, ...]:
    """The same rows with a query at every key."""
    return tuple(
        replace(
            group,
            queries=group.keys,
            query_index=group.key_index.where(group.key_index < _NEVER, 0),
            real=group.key_index < _NEVER,
        )
        for group in groups
    )


def ttt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    groups: Sequence[RowGroup],
    window: int | None = None,
) -> Tensor:
    """What each query attends to, [Q, Hq, D].

    Args:
        q: [Q, Hq, D]; Hq is a multiple of Hkv.
        k, v: [N, Hkv, D], step-0 keys and values of all rows.
        own_k, own_v: [Q, i, Hkv, D], each query's keys and values of steps 1 .. i; i may be 0.
        groups: every query in exactly one.
        window: positions that a query looks back at, its own included; None for all.
    """
    steps = own_k.shape[1]
    if window is not None:
        own_k, own_v = own_k[:, max(0, steps - window) :], own_v[:, max(0, steps - window) :]
    back = None if window is None else window - steps
    pieces = []
    for group in groups:
        rows, most = group.queries.shape
        at_once = max(1, SCORES_AT_ONCE // (rows * q.shape[1] * group.keys.shape[1]))
        for start in range(0, most, at_once):
            span = slice(start, start + at_once)
            args = (q, k, v, own_k, own_v, group, span, back)
            if torch.is_grad_enabled():
                attended = checkpoint(_attend, *args, use_reentrant=False, preserve_rng_state=False)
            else:
                attended = _attend(*args)
            real = group.real[:, span]
            pieces.append((group.queries[:, span][real], attended[real]))
    order = torch.cat([queries for queries, _ in pieces])
    attended = torch.cat([attended for _, attended in pieces])
    return torch.zeros_like(q).index_copy(0, order, attended)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    group: RowGroup,
    span: slice,
    back: int | None,
) -> Tensor:
    """[b, m, Hq, D]: the queries `span` of a group's rows; they see the last `back` step-0 keys, or all."""
    queries, kv_heads = group.queries[:, span], k.shape[1]
    qs = q[queries].unflatten(2, (kv_heads, -1)).transpose(1, 2) * q.shape[-1] ** -0.5  # [b, Hkv, m, G, D]
    ks, vs = k[group.keys].transpose(1, 2), v[group.keys].transpose(1, 2)  # [b, Hkv, K, D]
    own_ks, own_vs = own_k[queries].movedim(3, 1), own_v[queries].movedim(3, 1)  # [b, Hkv, m, i, D]
    keys_at, queries_at = group.key_index[:, None, :], group.query_index[:, span, None]
    hidden = keys_at > queries_at  # [b, m, K]
    if back is not None:
        hidden |= keys_at <= queries_at - back

    scores = (qs.flatten(2, 3) @ ks.mT).unflatten(2, qs.shape[2:4])  # [b, Hkv, m, G, K]
    scores = scores.masked_fill(hidden[:, None, :, None, :], -torch.inf)
    own_scores = (qs[..., None, :] * own_ks[..., None, :, :]).sum(-1)  # [b, Hkv, m, G, i]
    weights = torch.cat((scores, own_scores), dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
    prefix, own = weights.split((ks.shape[2], own_ks.shape[3]), dim=-1)
    attended = (prefix.flatten(2, 3) @ vs).view_as(qs) + (own[..., None] * own_vs[..., None, :, :]).sum(-2)
    return attended.transpose(1, 2).flatten(2, 3)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:r]) for r in range(len(sizes))]
