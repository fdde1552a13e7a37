"""One forward of the target over slots: new tokens in, states, features and cached keys out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cpu import Drawing, PackedLinear
from stages.targets.inference import inference
from stages.targets.slots import RowStep, SlotCache, SlotStep
from stages.targets.taps import FeatureTaps
from stages.targets.target import Target


class TargetStates(NamedTuple):
    """last: [B, N, h] after the final norm; features: [B, N, 3h] at the tap layers, None without taps; drawn:
    the target's own token behind each row, where they were asked for."""

    last: Tensor
    features: Tensor | None
    drawn: list[int] | None = None


class SlotForward:
    """Runs a target's layers over the tokens of a ``SlotStep`` and, when asked, returns the EAGLE features
    too.

    On a CPU every row's result has the same bits whatever rows are beside it, so that a tree verified at once
    gives what its tokens give one by one, in bfloat16 too (where the layers are; routed experts are not).
    """

    def __init__(self, target: Target, cache: SlotCache, *, layers: tuple[int, int, int] | None) -> None:
        """``layers`` are those whose inputs are the features; without them it can only decode plainly."""
        self.cache = cache
        self._target = target
        self._decoder = target.decoder
        self._layers = layers
        self._cpu = target.cpu
        self._output: PackedLinear | None = None
        if self._cpu is not None and not target.changes_logits:
            self._output = self._cpu.output
        fused = self._cpu is not None and self._cpu.decoder is not None
        self._taps = FeatureTaps(target.decoder, layers) if layers and not fused else None

    @inference
    def __call__(
        self, tokens: Tensor, positions: Tensor, step: SlotStep, *, tap: bool = False
    ) -> TargetStates:
        """tokens and positions int64 [B, N]; ``tap`` needs the layers."""
        if self._cpu is not None:
            states = self.rows(tokens.flatten(), positions.flatten(), step.places, tap=tap)
            last = states.last.view(*tokens.shape, -1)
            features = None if states.features is None else states.features.view(*tokens.shape, -1)
            return TargetStates(last, features)
        out = self._decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=_no_mask(tokens),
            use_cache=False,
            slots=step,
        )
        return TargetStates(out.last_hidden_state, self._take(tap))

    @inference
    def rows(
        self,
        tokens: Tensor,
        positions: Tensor,
        places: Tensor,
        *,
        tap: bool = False,
        drawing: Drawing | None = None,
    ) -> TargetStates:
        """A forward over rows of any sequences, on a CPU with its ops.

        Args:
            tokens, positions: int64 [M].
            places: int64 [M, 4], see ``RowStep``.
            drawing: asks for the token behind each row too; needs ``draws``.

        Returns:
            States [M, h], features [M, 3h] and tokens [M]; of these -1 where `PackedLinear.draw` says so.
        """
        assert self._cpu is not None
        step = RowStep(places, self.cache.where)
        drawn = None
        if self._cpu.decoder is not None:
            tapped = self._layers if tap and self._layers else ()
            last, features, drawn = self._cpu.decoder(
                tokens, positions, step, self.cache.rows, tapped, drawing
            )
        else:
            out = self._decoder(
                input_ids=tokens[None],
                position_ids=positions[None],
                attention_mask=_no_mask(tokens),
                use_cache=False,
                slots=step,
            )
            taken = self._take(tap)
            last, features = out.last_hidden_state[0], None if taken is None else taken[0]
        if drawing is not None and drawn is None:
            drawn = self.draw(last, drawing, [position + 1 for position in positions.tolist()])
        return TargetStates(last, features, drawn)

    @property
    def draws(self) -> bool:
        """Whether tokens can be found without logits."""
        return self._output is not None

    @inference
    def draw(self, last: Tensor, drawing: Drawing, positions: Sequence[int]) -> list[int]:
        """The token behind each of states [M, h] after the final norm, at these positions; see ``rows``."""
        assert self._output is not None
        return self._output.draw(last, drawing, positions)

    def logits(self, last: Tensor) -> Tensor:
        """Logits [..., V] of states [..., h] after the final norm."""
        output = self._cpu.output if self._cpu is not None else None
        return self._target.logits(last, output)

    def _take(self, tap: bool) -> Tensor | None:
        return self._taps.take() if tap and self._taps is not None else None

    @property
    def takes_rows(self) -> bool:
        """Whether ``rows`` can be called."""
        return self._cpu is not None


def _no_mask(tokens: Tensor) -> Tensor:
    """Makes transformers skip building a mask, as it has four dimensions; attention reads the step's."""
    return tokens.new_ones(1, 1, 1, 1, dtype=torch.bool)
