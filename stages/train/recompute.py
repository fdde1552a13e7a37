"""Activation checkpointing: the MLPs of a head's layers run again in the backward pass.

What they make in between, three times the intermediate size for each query and draft step, is most of what a
step keeps; the attention keeps nothing anyway (`stages.train.attention`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stages.heads import DecoderHead, DraftHead


def recompute_layers(head: DraftHead) -> None:
    """From now on the layers of `head` keep what goes into their MLPs only. Medusa's blocks keep little."""
    if not isinstance(head, DecoderHead):
        return
    for layer in head.layers_in_order:
        layer.output = _recomputed(layer.output)  # type: ignore[method-assign, assignment]


def _recomputed(output: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def run(residual: Tensor, attended: Tensor) -> Tensor:
        made: Tensor = checkpoint(output, residual, attended, use_reentrant=False, preserve_rng_state=False)
        return made

    return run
