"""Random trees, and the tensors that the kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu import DEVICE
from benchmarks.gpu.float64 import gumbel64
from benchmarks.gpu.size import Size
from kernels import Filters, node_depths

TOP_K, TOP_P, MIN_P = 50, 0.9, 0.01
Trees = list[list[int]]


def random_trees(batch: int, nodes: int, seed: int) -> Trees:
    """Parent lists, -1 the root; all trees but the first end in a quarter of padding, -2."""
    generator = torch.Generator().manual_seed(seed)
    trees = []
    for b in range(batch):
        real = nodes if b == 0 else max(1, nodes * 3 // 4)
        tree = [-1]
        for i in range(1, real):
            low = max(0, i - 6)
            tree.append(low + int(torch.randint(i - low, (1,), generator=generator)))
        trees.append(tree + [-2] * (nodes - real))
    return trees


def ancestor_words(trees: Sequence[Sequence[int]]) -> Tensor:
    """int64 [B, N]."""
    rows = []
    for tree in trees:
        words: list[int] = []
        for i, parent in enumerate(tree):
            words.append(0 if parent == -2 else (1 << i) | (words[parent] if parent >= 0 else 0))
        rows.append([w - (1 << 64) if w >= 1 << 63 else w for w in words])
    return torch.tensor(rows, device=DEVICE)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


@dataclass(frozen=True)
class Verification:
    """What `accept_tree` takes besides logits and tokens; every second sequence is greedy."""

    trees: Trees
    parents: Tensor
    positions: Tensor
    temperature: Tensor
    seed: Tensor
    sample: Tensor
    filters: Filters

    @classmethod
    def random(cls, batch: int, nodes: int) -> Verification:
        trees = random_trees(batch, nodes, seed=2)
        sequence = torch.arange(batch, device=DEVICE)
        return cls(
            trees,
            torch.tensor(trees, device=DEVICE),
            node_depths(ancestor_words(trees)).clamp(min=0) + 100,
            torch.where(sequence % 2 == 0, 0.8, 0.0).to(torch.float32),
            sequence + 2**40,
            sequence,
            Filters(*(torch.full((batch,), value, device=DEVICE) for value in (TOP_K, TOP_P, MIN_P))),
        )

    @property
    def keys(self) -> tuple[Tensor, ...]:
        return self.parents, self.positions, self.temperature, self.seed, self.sample

    def scores(self, logits: Tensor) -> Tensor:
        """What each node's draw maximises: float64 [B, N, V]."""
        batch, nodes, vocab = logits.shape
        seed, sample = (t.repeat_interleave(nodes) for t in (self.seed, self.sample))
        noise = gumbel64(seed, sample, self.positions.flatten() + 1, vocab).view(batch, nodes, vocab)
        heat = self.temperature[:, None, None].double()
        hot = logits.double() / torch.where(heat > 0, heat, 1.0) + noise
        return torch.where(heat > 0, hot, logits.double())


@dataclass(frozen=True)
class AttentionInputs:
    """A cache of several layers, and one tree for every sequence.

    cache: [2, layers, B, Hkv, rows, D]; query: [B, Hq, N, D].
    """

    cache: Tensor
    query: Tensor
    slots: Tensor
    lengths: Tensor
    words: Tensor

    @classmethod
    def make(cls, size: Size, storage: Tensor, batch: int, prefix: int, nodes: int) -> AttentionInputs:
        """Layers as the size asks for, as far as ``storage`` [elements] holds them."""
        model = size.model
        rows = prefix + nodes
        layer = 2 * batch * model.kv_heads * rows * model.head_dim
        wanted = max(2, -(-size.overflow // (layer * storage.element_size())))
        layers = max(1, min(wanted, model.layers, storage.numel() // layer))
        cache = storage[: layers * layer].view(2, layers, batch, model.kv_heads, rows, model.head_dim)
        words = ancestor_words(random_trees(1, nodes, seed=3) * batch)
        return cls(
            cache,
            normal(batch, model.heads, nodes, model.head_dim, dtype=size.dtype),
            torch.arange(batch, device=DEVICE),
            torch.full((batch,), prefix, device=DEVICE),
            words,
        )

    def bias(self, group: int) -> Tensor:
        """What PyTorch adds to the scores [B, Hkv, G * N, rows], one copy for all: 0 where a node sees a row
        and -inf where it does not."""
        batch, _, nodes, _ = self.query.shape
        kv_heads, rows = self.cache.shape[3:5]
        seen = torch.ones(nodes, rows, dtype=torch.bool, device=DEVICE)
        bits = torch.arange(nodes, device=DEVICE)
        seen[:, rows - nodes :] = ((self.words[0, :, None] >> bits) & 1).bool()
        bias = torch.zeros(nodes, rows, dtype=self.query.dtype, device=DEVICE)
        bias.masked_fill_(~seen, -torch.inf)
        return bias.repeat(group, 1).expand(batch, kv_heads, -1, -1)

    @staticmethod
    def storage(size: Size) -> Tensor:
        """Room for two layers of the largest shape."""
        rows = max(size.prefixes) + max(size.timed_nodes)
        layer = 2 * max(size.batches) * size.model.kv_heads * rows * size.model.head_dim
        return normal(2 * layer, dtype=size.dtype)

    @property
    def layers(self) -> int:
        return self.cache.shape[1]

    @property
    def bytes(self) -> int:
        """Cache read, query read and output written for one layer."""
        return (self.cache[:, 0].numel() + 2 * self.query.numel()) * self.cache.element_size()
