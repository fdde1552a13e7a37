"""A head's CPU ops compute what its modules do."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import load_ops
from stages.heads import HeadOptions, make_head
from stages.heads.cpu_head import CpuHead
from stages.heads.decoder_head import DecoderHead
from stages.targets import SlotCache, Target
from stages.targets.slots import RowStep

KINDS: list[tuple[str, dict[str, object]]] = [
    ("eagle3", {}),
    ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}),
    ("eagle3", {"norm_before_fc": True, "fc_norm": True, "norm_output": True}),
    ("eagle3", {"layers": 2}),
    ("eagle1", {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize(
    ("dtype", "coarse"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_the_ops_of_a_head_give_what_its_modules_give(
    kind: str, options: dict[str, object], dtype: torch.dtype, coarse: bool, tiny_target: Target
) -> None:
    assert load_ops() is None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = make_head(kind, tiny_target.config, 200, options=HeadOptions(**options))  # type: ignore[arg-type]
        for parameter in head.parameters():
            parameter.data.add_(torch.randn(parameter.shape), alpha=0.1)
        states = torch.randn(7, (3 if kind == "eagle3" else 1) * tiny_target.hidden_size)
    head = head.to(dtype).eval().requires_grad_(False)
    assert isinstance(head, DecoderHead)
    ops = CpuHead.of(head, coarse=coarse)
    assert ops is not None
    config, states = head.config, states.to(dtype)
    cache = SlotCache(
        layers=config.num_hidden_layers,
        slots=1,
        kv_heads=config.num_key_value_heads,
        rows=32,
        head_dim=config.head_dim,
        dtype=dtype,
        device=states.device,
    )
    rows = torch.arange(7)
    step = RowStep(
        torch.stack((torch.zeros(7, dtype=torch.int64), rows, rows, rows * 0 + 1), -1), cache.where
    )
    tokens = torch.arange(7) * 11

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    bound = 1e-4 if dtype == torch.float32 else 4e-2

    def same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert ours.dtype == theirs.dtype == dtype
        assert (ours - theirs).float().norm() < bound * theirs.float().norm()

    feature = head.fuse(states)
    same(ops.fuse(states), feature)
    hidden = head(tokens, feature, rows, attend)
    same(ops.forward(tokens, feature, rows, step, cache.rows), hidden)
    same(ops.feedback(hidden), head.feedback(hidden))
    same(ops.logits(hidden), head.logits(hidden))
    with pytest.raises((RuntimeError, IndexError), match=r"no row|out of range"):
        ops.forward(tokens + tiny_target.vocab_size, feature, rows, step, cache.rows)
