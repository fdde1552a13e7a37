"""Drafting with a small language model of the same tokenizer (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.decoding.drafters.calibration import Calibrations
from stages.decoding.drafters.growing import GrowingDrafter
from stages.decoding.drafters.rows import DraftRows, Run
from stages.errors import EagleError
from stages.targets import SlotCache, SlotStep, Target
from stages.targets.slots import RowStep


class ModelDrafter(GrowingDrafter):
    """Row i of the model's cache holds token x_i; it needs nothing of the target."""

    def __init__(
        self, model: Target, target: Target, *, slots: int = 1, calibrations: Calibrations | None = None
    ) -> None:
        """Raises EagleError: the two do not have the same tokenizer."""
        if model.fingerprint.tokenizer != target.fingerprint.tokenizer:
            raise EagleError(
                f"draft model {model.name} has another tokenizer than {target.name}; use one of its family"
            )
        self.model = model
        cache = SlotCache.for_model(model.config, slots=slots, rows=1, dtype=model.dtype, device=model.device)
        # Rows of the embedding beyond the target's vocabulary, if any, are padding.
        self._vocab_size = min(model.vocab_size, target.vocab_size)
        super().__init__(cache, torch.arange(self._vocab_size, device=model.device), calibrations)

    def forward(self, rows: DraftRows) -> Tensor:
        """One pass of the model over rows of any sequences: states [M, h]."""
        tokens, positions = rows.tokens, rows.positions
        if rows.compiled:
            return self._decode(tokens, positions, RowStep(rows.places, self.cache.where))
        parts = [
            self._decode(tokens[run.begin : run.end], positions[run.begin : run.end], self._step(run))
            for run in rows.runs
        ]
        return torch.cat(parts)

    def _decode(self, tokens: Tensor, positions: Tensor, step: SlotStep | RowStep) -> Tensor:
        mask = step.mask if isinstance(step, SlotStep) else torch.ones(1, 1, 1, 1, dtype=torch.bool)
        out = self.model.decoder(
            input_ids=tokens[None],
            position_ids=positions[None],
            # Four-dimensional, so that transformers builds none; attention reads the step.
            attention_mask=mask,
            use_cache=False,
            slots=step,
        )
        return out.last_hidden_state[0]

    def _step(self, run: Run) -> SlotStep:
        if run.words is None:
            return SlotStep.causal(self.cache, run.slot, [run.length], run.end - run.begin)
        words = torch.tensor([run.words], device=self.cache.data.device)
        return SlotStep.tree(self.cache, run.slot, [run.length], words, offset=run.offset)

    def _take_in(self, states: Tensor | None, rows: DraftRows) -> Tensor:
        return self.forward(rows)

    def _run(self, parents: Tensor, rows: DraftRows) -> Tensor:
        return self.forward(rows)

    def _logits(self, states: Tensor) -> Tensor:
        return self.model.logits(states)[:, : self._vocab_size]
