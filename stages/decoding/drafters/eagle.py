"""Drafting with an EAGLE-1 or EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stages.decoding.drafters.calibration import Calibrations
from stages.decoding.drafters.drafter import StateKind
from stages.decoding.drafters.growing import GrowingDrafter
from stages.decoding.drafters.one_op import draft
from stages.decoding.drafters.rows import DraftRows
from stages.decoding.row_tensors import PlacedRows
from stages.decoding.tree import MAX_EXPANDED, DraftTree, TreePlan
from stages.heads import Eagle1Head, Eagle3Head
from stages.heads.cpu_head import CpuHead
from stages.targets import SlotCache
from stages.targets.slots import RowStep


class EagleDrafter(GrowingDrafter):
    """The head's row i holds the pair (f_i, x_{i+1}) at RoPE position i; drafted nodes have the head's own
    state in the place of f.

    one_op: whether a cycle is one op, on a CPU that has it.
    """

    lag = 1

    def __init__(
        self,
        head: Eagle3Head | Eagle1Head,
        *,
        slots: int = 1,
        calibrations: Calibrations | None = None,
        coarse: bool = True,
    ) -> None:
        """``coarse``: whether a bfloat16 head may compute with weights in 8 bits, where that is faster."""
        config = head.config
        weight = head.embed_tokens.weight
        self.head = head
        self.state: StateKind = "aux" if head.kind == "eagle3" else "last"
        self._scale = config.head_dim**-0.5
        cache = SlotCache(
            layers=config.num_hidden_layers,
            slots=slots,
            kv_heads=config.num_key_value_heads,
            rows=1,
            head_dim=config.head_dim,
            dtype=weight.dtype,
            device=weight.device,
            spare=1,  # small, as there are few layers; see `stages.decoding.device`
        )
        self._cpu = CpuHead.of(head, coarse=coarse and weight.dtype == torch.bfloat16)
        self.one_op = self._cpu is not None
        super().__init__(cache, head.draft_ids, calibrations)

    def forward(self, feature: Tensor, rows: DraftRows) -> Tensor:
        """One pass of the head over rows of any sequences.

        Args:
            feature: [M, h], fused of the target's states or fed back.
            rows: their tokens, where their keys and values go, and what they see.

        Returns:
            The last layer's output [M, h].
        """
        if self._cpu is not None:
            step = RowStep(rows.places, rows.cache.where)
            return self._cpu.forward(rows.tokens, feature, rows.positions, step, rows.cache.rows)
        window = self.head.config.sliding_window

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return rows.attend(layer, query, key, value, scale=self._scale, window=window)

        return self.head(rows.tokens, feature, rows.positions, attend)

    def _grow(self, slots: Sequence[int], plans: Sequence[TreePlan]) -> list[DraftTree]:
        sequences = [self._sequences[slot] for slot in slots]
        # The op knows no token masks, and begins with verified tokens; one sequence that does not fit takes
        # the others with it.
        longest = max((plan.paths for plan in plans), key=len, default=())
        fits = all(s.waiting and s.params.token_mask is None for s in sequences)
        fits = fits and all(plan.paths == longest[: len(plan.paths)] for plan in plans)
        if not (self.one_op and slots and fits):
            return super()._grow(slots, plans)
        assert self._cpu is not None
        self.cache.reserve(max(s.length + len(s.waiting) for s in sequences) + MAX_EXPANDED)
        given = [states for s in sequences for states in s.states]
        states = given[0] if len(given) == 1 else torch.cat(given)
        trees, grown, self.passes, roots, rows = draft(
            self._cpu,
            self.cache,
            slots,
            sequences,
            plans,
            states,
            self.ranking,
            self.calibrations,
            self.lag,
        )
        for row, (sequence, tree) in enumerate(zip(sequences, grown, strict=True)):
            sequence.length += len(sequence.waiting)
            sequence.waiting, sequence.states = [], []
            sequence.state, sequence.growth, sequence.grown = (roots, row), None, tree
        self.rows = PlacedRows([sequence.length for sequence in sequences], *rows)
        return trees

    def _take_in(self, states: Tensor | None, rows: DraftRows) -> Tensor:
        assert states is not None, "an EAGLE head needs the target's states"
        feature = (self._cpu or self.head).fuse(states.to(self.cache.data.dtype))
        return self.forward(feature, rows)

    def _run(self, parents: Tensor, rows: DraftRows) -> Tensor:
        return self.forward((self._cpu or self.head).feedback(parents), rows)

    def _logits(self, states: Tensor) -> Tensor:
        return (self._cpu or self.head).logits(states)
