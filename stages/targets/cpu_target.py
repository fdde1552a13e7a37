"""A target made ready to decode on a CPU: packed weights and fused layers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kernels.cpu import DTYPES, PackedLinear, load_ops, pack_linears
from stages.errors import EagleWarning
from stages.targets.cpu_layers import CpuDecoder
from stages.targets.slots import RowStep, SlotCache, SlotStep

if TYPE_CHECKING:
    from stages.targets.target import Target

_TOKENS = 5
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Of the error's norm against that of the states; rounding alone stays far below."""


@dataclass(frozen=True)
class CpuTarget:
    """decoder: None where the target's modules run one by one, over packed linear layers.
    output: the target's lm_head; None if it cannot be packed."""

    decoder: CpuDecoder | None
    output: PackedLinear | None


def cpu_target(target: Target) -> CpuTarget | None:
    """None where the CPU ops do not apply: on a GPU, in float16, or where they cannot be had (then warns)."""
    if target.device.type != "cpu" or target.dtype not in DTYPES:
        return None
    if (reason := load_ops()) is not None:
        warnings.warn(
            f"decoding is slower than it could be, for want of CPU ops: {reason}", EagleWarning, stacklevel=2
        )
        return None
    head = target.model.get_output_embeddings()
    output = PackedLinear(head) if PackedLinear.fits(head) else None
    decoder = CpuDecoder.of(target.decoder, target.config, target.max_length, output)
    if decoder is not None and not _agrees(decoder, target):
        decoder = None
    if decoder is None:
        pack_linears(target.decoder)
    return CpuTarget(decoder, output)


def release_packed(target: Target) -> int:
    """See ``Target.release_packed``."""
    if target.cpu is None:
        return 0
    packed: list[nn.Linear] = []
    if target.cpu.decoder is not None:  # modules that run one by one may look at their weights
        layers: Any = target.decoder.layers
        packed += [layer for layer in layers.modules() if PackedLinear.fits(layer)]
    output = target.model.get_output_embeddings()
    if target.cpu.output is not None and output.weight is not target.model.get_input_embeddings().weight:
        packed.append(output)
    freed = sum(layer.weight.nbytes for layer in packed)
    for layer in packed:
        layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)
    return freed


@torch.inference_mode()
def _agrees(decoder: CpuDecoder, target: Target) -> bool:
    """Whether the fused layers compute what transformers' modules do, on a few tokens."""
    tokens = torch.arange(_TOKENS) * 7 % target.vocab_size
    positions = torch.arange(_TOKENS)
    cache = SlotCache.for_model(
        target.config, slots=1, rows=_TOKENS, dtype=target.dtype, device=target.device
    )
    step = RowStep(SlotStep.causal(cache, 0, [0], _TOKENS).places, cache.where)
    ours, _, _ = decoder(tokens, positions, step, _TOKENS)
    theirs = target.decoder(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    return bool(error < _TOLERANCE[target.dtype])
