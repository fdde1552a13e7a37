"""What the launchers launch, seen without a GPU: how often, over what, and whether it was compiled before."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import Filters

pytest.importorskip("triton")

NODES, VOCAB, HIDDEN = 16, 128_256, 4096
BF16 = torch.bfloat16


@dataclass
class Seen(TorchDispatchMode):
    """launches: kernel, grid and constants of each; largest: elements of the largest tensor that was made."""

    launches: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = field(default_factory=list)
    largest: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket
        assert name not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), "the host waits"
        found = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, tensor.numel())
        return found

    @property
    def names(self) -> list[str]:
        return [kernel.fn.__name__ for kernel, _, _ in self.launches]


@pytest.fixture
def seen(monkeypatch):
    from triton.runtime.jit import JITFunction

    from kernels import tree_attention_triton

    seen = Seen()

    def run(kernel, *args, grid, warmup, **options):
        seen.launches.append((kernel, grid, options))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(tree_attention_triton, "_processors", lambda device: 132)
    return seen


def verification(batch: int) -> tuple[torch.Tensor, ...]:
    """Tokens, parents, positions, temperature, seed and sample."""
    integers = [torch.zeros(batch, NODES, dtype=torch.int64) for _ in range(3)]
    return *integers, torch.ones(batch), *(torch.zeros(batch, dtype=torch.int64) for _ in range(2))


def test_acceptance_is_three_launches_at_most_and_stores_nothing_as_large_as_the_logits(seen):
    from kernels.accept_triton import accept_states_triton, accept_tree_triton

    batch = 2
    logits, keys = torch.zeros(batch, NODES, VOCAB, dtype=BF16), verification(batch)
    filters = Filters(torch.full((batch,), 5), torch.ones(batch), torch.zeros(batch))
    states, weight = torch.zeros(batch, NODES, HIDDEN, dtype=BF16), torch.zeros(VOCAB, HIDDEN, dtype=BF16)
    with seen:
        accept_tree_triton(logits, *keys)
        assert seen.names == ["_tile_kernel", "_walk_kernel"]
        seen.launches.clear()
        accept_tree_triton(logits, *keys, filters=filters)
        assert seen.names == ["_floor_kernel", "_tile_kernel", "_walk_kernel"]
        seen.launches.clear()
        accept_states_triton(states, weight, *keys)
        assert seen.names == ["_head_kernel", "_walk_kernel"]
    assert seen.largest <= batch * NODES * -(-VOCAB // 100)


def test_what_a_real_model_launches_is_what_is_compiled_ahead_of_time(seen):
    from kernels.accept_triton import accept_states_triton, accept_tree_triton
    from kernels.ahead_of_time import builds
    from kernels.compact_triton import compact_triton
    from kernels.draft_topk_triton import draft_topk_triton
    from kernels.noise_triton import gumbel_noise_vocab_triton
    from kernels.tree_attention_triton import tree_attention_triton

    one = torch.zeros(1, dtype=torch.int64)

    def attention(heads: int, kv_heads: int, nodes: int, dim: int, **options: Any) -> None:
        cache = torch.zeros(2, 1, kv_heads, 2064, dim, dtype=BF16)
        query, words = torch.zeros(1, heads, nodes, dim, dtype=BF16), torch.ones(1, nodes, dtype=torch.int64)
        tree_attention_triton(query, *cache, one, one, words, 0.1, **options)

    attention(32, 8, 16, 128)  # Llama-3.1-8B: 64 rows
    attention(32, 8, 32, 128)
    attention(32, 8, 1, 128)
    attention(9, 3, 5, 64)  # SmolLM2
    attention(32, 8, 16, 64)  # Llama-3.2-1B
    attention(8, 4, 16, 256, sliding_window=512, softcap=50.0)  # Gemma 2
    attention(32, 8, 16, 80)
    keys = verification(1)
    accept_tree_triton(torch.zeros(1, NODES, VOCAB, dtype=BF16), *keys)
    filters = Filters(one, torch.ones(1), torch.ones(1))
    allowed = torch.zeros(1, NODES, -(-VOCAB // 32), dtype=torch.int32)
    accept_tree_triton(torch.zeros(1, NODES, VOCAB, dtype=BF16), *keys, filters=filters, allowed=allowed)
    states, weight = torch.zeros(4, NODES, HIDDEN, dtype=BF16), torch.zeros(VOCAB, HIDDEN, dtype=BF16)
    accept_states_triton(states, weight, *verification(4))
    rows, half = torch.arange(12), torch.full((12,), 0.5)
    more = {"temperature": half, "strength": half, "positions": rows, "seed": rows, "sample": rows}
    logits = torch.zeros(12, 32_000, dtype=BF16)
    draft_topk_triton(logits, half, 10, target_ids=torch.arange(32_000), **more)
    compact_triton(torch.zeros(2, 2, 1, 8, 64, 128, dtype=BF16), one, one, keys[0], one)
    gumbel_noise_vocab_triton(one, one, one, VOCAB)

    known = [(build.kernel, build.warps, build.constants) for build in builds("90")]
    for kernel, _, options in seen.launches:
        constants = {p.name: options[p.name] for p in kernel.params if p.is_constexpr}
        warps = options.get("num_warps", 4)
        if "SPLITS" in constants:
            continue  # any number of splits
        assert any(
            kernel is other and warps == count and constants.items() <= given.items()
            for other, count, given in known
        ), f"{kernel.fn.__name__} {constants} with {warps} warps is not among the builds"


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "nodes"),
    [(1, 32, 8, 16), (1, 64, 8, 16), (1, 28, 4, 16), (1, 16, 2, 16), (8, 32, 8, 16), (32, 32, 8, 32)],
)
def test_at_a_prefix_of_8k_every_multiprocessor_has_work(seen, batch, heads, kv_heads, nodes):
    from kernels.tree_attention_triton import tree_attention_triton

    cache = torch.zeros(1, 1, 1, 1, 128, dtype=BF16).expand(2, batch, kv_heads, 8192 + nodes, 128)
    query, words = torch.zeros(batch, heads, nodes, 128, dtype=BF16), torch.ones(batch, nodes).long()
    numbers = torch.zeros(batch, dtype=torch.int64)
    tree_attention_triton(query, *cache, numbers, numbers, words, 0.1)
    _, (blocks, splits, pairs), options = seen.launches[0]
    programs, places = blocks * splits * pairs, 132 * (8 // options["num_warps"])
    assert programs / (-(-programs // places) * places) > 0.85
    tiles = (8192 + nodes) // options["KEYS"]
    assert splits <= tiles // 2


def test_the_cache_is_not_copied(seen):
    """Neither by a launcher nor on the way to it: views of slots are read where they lie."""
    module = importlib.import_module("kernels.tree_attention")
    cache = torch.zeros(2, 3, 4, 8, 512, 128, dtype=BF16).transpose(3, 4).contiguous().transpose(3, 4)
    query, words = torch.zeros(2, 32, 16, 128, dtype=BF16), torch.ones(2, 16, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch, seen:
        patch.setattr(module, "use_triton", lambda tensor: True)
        module.tree_attention(
            query, cache[0, 1], cache[1, 1], slice(1, 3), torch.tensor([9, 400]), words, 0.1
        )
    assert seen.names[0] == "_split_kernel"
    assert seen.largest < cache[0, 1].numel()
