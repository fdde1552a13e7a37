"""One forward of the target over slots: new tokens in, states, features and cached keys out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stages.targets.slots import SlotCache, SlotStep
from stages.targets.taps import FeatureTaps
from stages.targets.target import Target


@dataclass(frozen=True)
class TargetStates:
    """last: [B, N, h] after the final norm; features: [B, N, 3h] at the tap layers, None without taps."""

    last: Tensor
    features: Tensor | None


class SlotForward:
    """Runs a target's layers over the tokens of a ``SlotStep`` and, when asked, returns the EAGLE features
    too."""

    def __init__(self, target: Target, cache: SlotCache, *, layers: tuple[int, int, int] | None) -> None:
        """``layers`` are those whose inputs are the features; without them it can only decode plainly."""
        self.cache = cache
        self._decoder = target.decoder
        self._taps = FeatureTaps(target.decoder, layers) if layers else None

    @torch.inference_mode()
    def __call__(
        self, tokens: Tensor, positions: Tensor, step: SlotStep, *, tap: bool = False
    ) -> TargetStates:
        """tokens and positions int64 [B, N]; ``tap`` needs the hooks."""
        # A four-dimensional mask makes transformers skip building its own; attention reads the step's.
        out = self._decoder(
            input_ids=tokens, position_ids=positions, attention_mask=step.mask, use_cache=False, slots=step
        )
        features = self._taps.take() if tap and self._taps is not None else None
        return TargetStates(out.last_hidden_state, features)

    def close(self) -> None:
        """Remove the hooks from the target."""
        if self._taps is not None:
            self._taps.close()
