"""Lossless acceptance: draw the target's own token at every node, and follow the child that equals it.

    y[i] = argmax_v x[i, v]                                             temperature 0,  x = logits
    y[i] = argmax_v x[i, v] + G(seed, sample, positions[i] + 1, v)      temperature T,  x = logits / T

over the tokens v that are allowed and that the filters keep (`kernels.filters`), with G of `kernels.noise`:
adding Gumbel noise and taking the maximum draws from softmax(x), and since the noise belongs to a position
and not to a node, the draw is the one plain decoding would make there. Ties go to the lowest id. A logit that
is NaN counts as -inf; the first +inf is drawn where there is one, and token 0 where all are -inf. From the
root the walk descends to the child whose token is y of its parent, until there is none; the last y is the
bonus. `path` and `count` are the moves of the cache's rows, as `kernels.compact` takes them.

Cost: N * V logits are read once, and as `kernels.filters` says where tokens are filtered; at a temperature,
one Philox call for four tokens that are left. `accept_states` makes the logits too: h * V weights and N * h
states are read once, 2 * N * h * V operations, and the N * V logits are neither written nor read.

Source: Gumbel-max, Maddison et al., arXiv 1411.0030; that the walk is lossless: docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu import DTYPES, ops_loaded
from kernels.dispatch import use_triton
from kernels.filters import Filters, allowed_tokens, filter_floor
from kernels.noise import GUMBEL_MAX, GUMBEL_MIN, gumbel_noise, gumbel_noise_vocab

ROOT = -1
PADDING = -2

_TILE = 256


@dataclass(frozen=True)
class Acceptance:
    """What a verification accepted.

    path: int64 [B, N], node indices along the accepted path, the root (0) first, padded with -1.
    count: int64 [B], accepted nodes with the root, at least 1.
    token: int64 [B], the bonus token: what the target drew after the last accepted node.
    drawn: int64 [B, N], the target's own token at every node.
    """

    path: Tensor
    count: Tensor
    token: Tensor
    drawn: Tensor


def first_argmax(values: Tensor) -> Tensor:
    """Index of the first maximum along the last dimension, NaN counting as -inf: int64 [...] of [..., V].

    On a CPU several times faster than `values.argmax(-1)`: a maximum without its index is vectorised, so
    tiles are reduced first, and the index is sought in one tile only.
    """
    if _has_ops(values):
        return torch.ops.eagle_cpu.argmax(values)
    values = values.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    size = values.shape[-1]
    tiles = size // _TILE
    if values.device.type != "cpu" or tiles < 2:
        return values.argmax(-1)
    head = values[..., : tiles * _TILE].unflatten(-1, (tiles, _TILE))
    peaks = head.amax(-1)  # [..., tiles]
    tile = peaks.argmax(-1, keepdim=True)
    inside = head.gather(-2, tile.unsqueeze(-1).expand(*tile.shape, _TILE)).squeeze(-2)
    first = (tile * _TILE).squeeze(-1) + inside.argmax(-1)
    if size > tiles * _TILE:
        tail, index = values[..., tiles * _TILE :].max(-1)
        first = torch.where(tail > peaks.amax(-1), tiles * _TILE + index, first)
    return first


def _has_ops(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype in DTYPES and ops_loaded()


def _draw(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    sample: Tensor,
    floor: Tensor | None = None,
) -> Tensor:
    """The target's token at every node, int64 [B, N]; tempered logits below ``floor`` [B, N] are ruled
    out."""
    batch, nodes, _ = logits.shape
    if _has_ops(logits):
        heat, seeds, samples = (t.repeat_interleave(nodes) for t in (temperature, seed, sample))
        floors = None if floor is None else floor.flatten()
        rows, following = logits.flatten(0, 1), positions.flatten() + 1
        return _draw_by_op(rows, following, heat, seeds, samples, floors).view(-1, nodes)
    if floor is not None:
        heat = torch.where(temperature > 0, temperature, 1.0)[:, None, None]
        logits = logits.masked_fill(logits.float() / heat < floor.unsqueeze(-1), -torch.inf)
    hot = [b for b, t in enumerate(temperature.tolist()) if t > 0]
    if not hot:
        return first_argmax(logits)
    sampled = slice(None) if len(hot) == batch else torch.tensor(hot, device=logits.device)
    scaled = logits[sampled].to(torch.float32) / temperature[sampled, None, None]
    tokens = _sample(
        scaled.flatten(0, 1),
        seed[sampled].repeat_interleave(nodes),
        sample[sampled].repeat_interleave(nodes),
        positions[sampled].flatten() + 1,
    ).view(-1, nodes)
    if len(hot) == batch:
        return tokens
    drawn = first_argmax(logits)
    drawn[sampled] = tokens
    return drawn


def _draw_by_op(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    sample: Tensor,
    floor: Tensor | None,
) -> Tensor:
    """`draw_tokens` by the CPU op, with the filters' floor [M]: the same token for token, as rows that the op
    leaves to rounding are drawn here."""
    drawn = torch.ops.eagle_cpu.draw(logits, temperature, seed, sample, positions, floor)
    for row in [row for row, token in enumerate(drawn.tolist()) if token < 0]:
        one = slice(row, row + 1)
        scaled = logits[one].float() / temperature[one, None]
        if floor is not None:
            scaled.masked_fill_(scaled < floor[one, None], -torch.inf)
        drawn[one] = _sample(scaled, seed[one], sample[one], positions[one])
    return drawn


def _sample(scaled: Tensor, seed: Tensor, sample: Tensor, position: Tensor) -> Tensor:
    """Gumbel-max draws of M rows.

    Args:
        scaled: fp32 [M, V], logits over temperature; overwritten.
        seed: int64 [M], the key of each row's noise, with sample and position.

    Returns:
        int64 [M].
    """
    vocab_size = scaled.shape[1]
    scaled.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
    keys = list(zip(seed.tolist(), sample.tolist(), position.tolist(), strict=True))
    distinct = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    peak = scaled.amax(-1, keepdim=True)
    # A token this far below the peak loses whatever the noise, so after top-k, top-p or at a low temperature
    # few tokens need any. The last term covers the rounding of the sum.
    reach = peak - (GUMBEL_MAX - GUMBEL_MIN) - peak.abs() * 2.0**-22
    keep = scaled >= torch.where(peak.isinf(), peak, reach)
    counts = keep.sum(-1)
    if int(counts.sum()) * 8 < len(distinct) * vocab_size:
        row, token = keep.nonzero(as_tuple=True)
        noise = gumbel_noise(seed[row], sample[row], position[row], token.unsqueeze(-1)).squeeze(-1)
        scores = (scaled[row, token] + noise).split(counts.tolist())
        return torch.stack([t[s.argmax()] for s, t in zip(scores, token.split(counts.tolist()), strict=True)])
    once = torch.tensor(list(distinct), device=scaled.device)  # [distinct, 3]
    noise = gumbel_noise_vocab(once[:, 0], once[:, 1], once[:, 2], vocab_size)
    for i, key in enumerate(keys):
        scaled[i] += noise[distinct[key]]
    return first_argmax(scaled)


def _walk(drawn: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted path, count and bonus token of every sequence."""
    nodes = drawn.shape[1]
    paths, counts, bonus = [], [], []
    for y, token, parent in zip(drawn.tolist(), tokens.tolist(), parents.tolist(), strict=True):
        path = [0]
        # A parent precedes its children, so one pass forward meets the accepted path in order.
        for i in range(1, nodes):
            if parent[i] == path[-1] and token[i] == y[path[-1]]:
                path.append(i)
        counts.append(len(path))
        bonus.append(y[path[-1]])
        paths.append(path + [-1] * (nodes - len(path)))
    device = drawn.device
    return (
        torch.tensor(paths, device=device),
        torch.tensor(counts, device=device),
        torch.tensor(bonus, device=device),
    )


def draw_tokens(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    sample: Tensor,
    *,
    filters: Filters | None = None,
) -> Tensor:
    """The target's own token of every row, each with a key of its own.

    Args:
        logits: [M, V], any float dtype; tokens ruled out already hold -inf.
        positions: int64 [M], absolute position of the token that is drawn.
        temperature: fp32 [M], 0 for greedy; seed and sample int64 [M].
        filters: of M rows.

    Returns:
        int64 [M].
    """
    rows = logits[:, None]
    if use_triton(logits):
        at = positions[:, None] - 1
        root = torch.full_like(at, ROOT)  # every row as a tree of its own
        return accept_tree(rows, root, root, at, temperature, seed, sample, filters=filters).token
    floor = None if filters is None else filter_floor(rows, temperature, filters)
    if _has_ops(logits):
        floors = None if floor is None else floor[:, 0]
        return _draw_by_op(logits, positions, temperature, seed, sample, floors)
    return _draw(rows, positions[:, None] - 1, temperature, seed, sample, floor)[:, 0]


def accept_tree(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    sample: Tensor,
    *,
    filters: Filters | None = None,
    allowed: Tensor | None = None,
) -> Acceptance:
    """Verify draft trees against the target's logits.

    Args:
        logits: [B, N, V], any float dtype; tokens ruled out already hold -inf.
        tokens: int64 [B, N], each node's token; the children of one node differ.
        parents: int64 [B, N], index of each node's parent, smaller than its own; -1 the root (index 0), -2
            padding.
        positions: int64 [B, N], absolute position of each node's token.
        temperature: fp32 [B], 0 for greedy.
        seed: int64 [B].
        sample: int64 [B].
        filters: top-k, top-p and min-p of every sequence.
        allowed: int32 [B, N, ceil(V / 32)], the tokens that may follow each node, packed as `allowed_tokens`
            says; at least one a node.
    """
    if use_triton(logits):
        from kernels.accept_triton import accept_tree_triton

        return accept_tree_triton(
            logits, tokens, parents, positions, temperature, seed, sample, filters=filters, allowed=allowed
        )
    return accept_tree_torch(
        logits, tokens, parents, positions, temperature, seed, sample, filters=filters, allowed=allowed
    )


def accept_tree_torch(
    logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    sample: Tensor,
    *,
    filters: Filters | None = None,
    allowed: Tensor | None = None,
) -> Acceptance:
    """`accept_tree` in torch."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed_tokens(allowed, logits.shape[-1]), -torch.inf)
    floor = None if filters is None else filter_floor(logits, temperature, filters)
    drawn = _draw(logits, positions, temperature, seed, sample, floor)
    path, count, token = _walk(drawn, tokens, parents)
    return Acceptance(path=path, count=count, token=token, drawn=drawn)


def accept_states(
    states: Tensor,
    weight: Tensor,
    tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    sample: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    allowed: Tensor | None = None,
) -> Acceptance:
    """`accept_tree` of the logits cap(scale * states @ weight^T), which never reach memory.

    The kernel keeps the logits in fp32, where a separate product would round them to the dtype of its output,
    so that near-ties may fall otherwise: one request must not change between the two. No filters: they need
    all of a node's logits before the first token is drawn.

    Args:
        states: [B, N, h], after the target's final norm.
        weight: [V, h], of the target's LM head.
        scale: factor of the logits (Granite, Cohere).
        softcap: bound of the logits, if any (Gemma 2).
        tokens: this and the rest as in `accept_tree`.
    """
    if use_triton(states):
        from kernels.accept_triton import accept_states_triton

        run = accept_states_triton
    else:
        run = accept_states_torch
    return run(
        states,
        weight,
        tokens,
        parents,
        positions,
        temperature,
        seed,
        sample,
        scale=scale,
        softcap=softcap,
        allowed=allowed,
    )


def accept_states_torch(
    states: Tensor,
    weight: Tensor,
    tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    sample: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    allowed: Tensor | None = None,
) -> Acceptance:
    """`accept_states` in torch; its product rounds to the dtype of the states."""
    logits = F.linear(states, weight).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return accept_tree_torch(logits, tokens, parents, positions, temperature, seed, sample, allowed=allowed)
