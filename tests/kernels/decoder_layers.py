"""Random decoder layers of Llama's kind over slots: the CPU op, and what it means in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stages.targets.cpu_layers import CpuLayers, pack_layer
from tests.kernels.trees import ancestor_words, attention_by_definition, chain_of


@dataclass(frozen=True)
class Layers:
    """Shapes and switches; see `kernels/cpu/layers.h`.

    norms: the kind of norm; query_norms, sandwich: norms of queries and keys, and behind attention and MLP.
    """

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    inner: int = 96
    depth: int = 2
    gelu: bool = False
    norms: int = 0
    query_norms: bool = False
    sandwich: bool = False
    biased: bool = False
    window: int = 0
    softcap: float = 0.0
    turned: int | None = None
    dtype: torch.dtype = torch.float32


class Decoder:
    """Layers with weights, a cache of three slots, and sequences in it: (slot, prefix, parents of a tree)."""

    def __init__(self, layers: Layers, sequences: list[tuple[int, int, list[int]]], seed: int = 0) -> None:
        self.shape, self.sequences = layers, sequences
        generator = torch.Generator().manual_seed(seed)

        def randn(*size: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(*size, generator=generator)).to(layers.dtype)

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            module = nn.Linear(1, 1, bias=bias)
            module.weight = nn.Parameter(randn(outputs, inputs, scale=inputs**-0.5), requires_grad=False)
            if bias:
                module.bias = nn.Parameter(randn(outputs, scale=0.1), requires_grad=False)
            return module

        shape, s = layers, layers.size
        names = {"input": shape.hidden, "mlp": shape.hidden}
        names |= {"query": s, "key": s} if shape.query_norms else {}
        names |= {"post": shape.hidden, "post_mlp": shape.hidden} if shape.sandwich else {}
        self.modules = [
            {
                "qkv": [
                    linear(shape.hidden, n * s, shape.biased)
                    for n in (shape.heads, shape.kv_heads, shape.kv_heads)
                ],
                "out": linear(shape.heads * s, shape.hidden, shape.biased),
                "gate": linear(shape.hidden, shape.inner),
                "up": linear(shape.hidden, shape.inner),
                "down": linear(shape.inner, shape.hidden),
                "norms": {name: randn(n, scale=0.2) + (shape.norms != 1) for name, n in names.items()},
            }
            for _ in range(shape.depth)
        ]
        rows = max(length + len(tree) for _, length, tree in sequences) + 2
        self.cache = randn(2, shape.depth, 3, shape.kv_heads, rows, s)
        count = sum(len(tree) for _, _, tree in sequences)
        self.states = randn(count, shape.hidden)
        turned = shape.turned or s
        angles = torch.arange(rows)[:, None] * 100.0 ** (-torch.arange(0, turned, 2) / turned)
        self.cos, self.sin = (
            torch.cat([t, t], -1)[None].to(layers.dtype) for t in (angles.cos(), angles.sin())
        )
        self.positions = torch.tensor(
            [
                length + len(chain_of(tree, i)) - 1 if parent > -2 else 0
                for _, length, tree in sequences
                for i, parent in enumerate(tree)
            ]
        )
        self._packed: CpuLayers | None = None

    @property
    def packed(self) -> CpuLayers:
        if self._packed is None:
            shape = self.shape
            weights = [
                tensor
                for m in self.modules
                for tensor in pack_layer(m["qkv"], m["out"], m["gate"], m["up"], m["down"], m["norms"])
            ]
            sizes = [shape.heads, shape.kv_heads, shape.size, shape.inner, int(shape.gelu)]
            kinds, scale = [0, shape.window] * shape.depth, shape.size**-0.5
            self._packed = CpuLayers(
                weights, kinds, sizes, scale=scale, softcap=shape.softcap, eps=1e-6, norms=shape.norms
            )
        return self._packed

    def by_op(self, rows: list[int] | None = None, tapped: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """States [M, h] behind the layers, of all rows or some, and features; the cache is left alone."""
        cache = self.cache.clone()
        places = [
            [-1 if parent == -2 else slot, length + i, length, word]
            for slot, length, tree in self.sequences
            for i, (parent, word) in enumerate(zip(tree, ancestor_words([tree])[0].tolist(), strict=True))
        ]
        where = torch.tensor([cache[0].data_ptr(), cache[1].data_ptr(), *cache.stride()[1:4]])
        chosen = torch.arange(len(places)) if rows is None else torch.tensor(rows)
        p, x = self.packed, self.states[chosen]
        features = x.new_empty(len(x), len(tapped) * x.shape[1])
        out = torch.ops.eagle_cpu.layers(
            *(p.stack, x, None, torch.tensor(places)[chosen], self.positions[chosen], where),
            *(self.cos, self.sin, features, list(tapped)),
        )
        return out, features

    def by_definition(self) -> tuple[Tensor, list[Tensor]]:
        """float64 states behind the layers, and those that enter each; rows of padding mean nothing."""
        shape = self.shape
        x, cache, entering = self.states.double(), self.cache.double(), []
        cos, sin = self.cos[0].double()[self.positions, None], self.sin[0].double()[self.positions, None]

        def norm(x: Tensor, gain: Tensor | None) -> Tensor:
            if gain is None:
                return x
            x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            return x * (gain.double() + (shape.norms == 1))

        def linear(x: Tensor, module: nn.Linear) -> Tensor:
            bias = None if module.bias is None else module.bias.double()
            return nn.functional.linear(x, module.weight.double(), bias)

        def rotate(x: Tensor) -> Tensor:
            turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
            low, high = turned.chunk(2, -1)
            return torch.cat([turned * cos + torch.cat([-high, low], -1) * sin, kept], -1)

        for depth, m in enumerate(self.modules):
            gains = m["norms"]
            entering.append(x)
            q, k, v = (
                linear(norm(x, gains["input"]), module).unflatten(-1, (-1, shape.size)) for module in m["qkv"]
            )
            q, k = rotate(norm(q, gains.get("query"))), rotate(norm(k, gains.get("key")))
            seen, first = [], 0
            for slot, length, tree in self.sequences:
                here = slice(first, first := first + len(tree))
                for to, new in zip(cache[:, depth, slot], (k[here], v[here]), strict=True):
                    to[:, length : length + len(tree)] = new.transpose(0, 1)
                out = attention_by_definition(
                    q[here].transpose(0, 1)[None],
                    *(part[depth] for part in cache),
                    [slot],
                    [length],
                    [tree],
                    shape.size**-0.5,
                    shape.window or None,
                    shape.softcap or None,
                )
                seen.append(out[0].transpose(0, 1).flatten(1))
            x = x + norm(linear(torch.cat(seen), m["out"]), gains.get("post"))
            inside = norm(x, gains["mlp"])
            gate = linear(inside, m["gate"])
            gate = nn.functional.gelu(gate, approximate="tanh") if shape.gelu else nn.functional.silu(gate)
            x = x + norm(linear(gate * linear(inside, m["up"]), m["down"]), gains.get("post_mlp"))
        return x, entering
