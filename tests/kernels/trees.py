"""Random draft trees, and what the ops mean, spelled out node by node in float64."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


@st.composite
def parents(draw: st.DrawFn, max_nodes: int, batch: int = 1) -> list[list[int]]:
    """Parent lists of `batch` trees, padded to one width: -1 the root, -2 padding."""
    width = draw(st.integers(1, max_nodes))
    trees = []
    for _ in range(batch):
        nodes = draw(st.integers(1, width))
        tree = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, nodes)]
        trees.append(tree + [-2] * (width - nodes))
    return trees


def ancestor_words(trees: list[list[int]]) -> Tensor:
    """int64 [B, N] of parent lists; 0 for padding."""
    rows = []
    for tree in trees:
        words: list[int] = []
        for i, parent in enumerate(tree):
            word = 0 if parent == -2 else (1 << i) | (words[parent] if parent >= 0 else 0)
            words.append(word)
        rows.append([w - (1 << 64) if w >= 1 << 63 else w for w in words])
    return torch.tensor(rows, dtype=torch.int64)


def chain_of(tree: list[int], node: int) -> list[int]:
    """The node, its parent, and so on to the root."""
    chain = [node]
    while tree[chain[-1]] >= 0:
        chain.append(tree[chain[-1]])
    return chain


def attention_by_definition(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: list[int],
    lengths: list[int],
    trees: list[list[int]],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Node by node: the rows it may see, found by walking parents, one softmax. float64 [B, Hq, N, D]."""
    batch, heads, nodes, _ = query.shape
    group = heads // keys.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    query, keys, values = query.cpu().double(), keys.cpu().double(), values.cpu().double()
    for b in range(batch):
        for i in range(nodes):
            if trees[b][i] == -2:
                continue
            chain = chain_of(trees[b], i)
            rows = {row: row for row in range(lengths[b])}  # row -> position
            rows |= {lengths[b] + j: lengths[b] + len(chain_of(trees[b], j)) - 1 for j in chain}
            here = lengths[b] + len(chain) - 1
            seen = [row for row, position in rows.items() if window is None or here - position < window]
            for h in range(heads):
                scores = keys[slots[b], h // group, seen] @ query[b, h, i] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[b, h, i] = torch.softmax(scores, 0) @ values[slots[b], h // group, seen]
    return out


@st.composite
def strange_logits(draw: st.DrawFn, rows: int, sizes: list[int]) -> Tensor:
    """[rows, V] with NaN and infinities among them, or nothing else."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = 3 * torch.randn(rows, draw(st.sampled_from(sizes)), generator=generator)
    for row in logits:
        for value in (torch.nan, -torch.inf, torch.inf):
            share = draw(st.sampled_from([0.0, 0.0, 0.02, 0.9, 1.0]))
            row[torch.rand(len(row), generator=generator) < share] = value
    return logits


def path_by_definition(drawn: list[int], tokens: list[int], tree: list[int]) -> list[int]:
    """From the root, the child that holds the drawn token, until there is none."""
    path = [0]
    while True:
        children = [i for i, p in enumerate(tree) if p == path[-1] and tokens[i] == drawn[path[-1]]]
        if not children:
            return path
        path.append(children[0])


def tokens_that_meet(drawn: list[int], tree: list[int], hits: list[bool]) -> list[int]:
    """Tokens for a tree whose siblings differ: node i holds its parent's draw where hits[i] asks so."""
    tokens = [0] * len(tree)
    taken: dict[int, set[int]] = {}
    for i, parent in enumerate(tree):
        if parent < 0:
            continue
        used = taken.setdefault(parent, set())
        token = drawn[parent] if hits[i] and drawn[parent] not in used else -10 - i
        used.add(token)
        tokens[i] = token
    return tokens
