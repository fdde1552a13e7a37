"""The EAGLE-3 draft head (arXiv 2503.01840, section 3): feature fusion, layers, a reduced vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from stages.heads.config import HeadKind
from stages.heads.decoder_head import DecoderHead
from stages.heads.eagle3_config import Eagle3Config
from stages.heads.layers import DraftLayer, FusionLayer, HiddenLayer, RMSNorm
from stages.heads.vocabulary import check_vocabulary

TAPS = 3


class Eagle3Head(DecoderHead):
    """An EAGLE-3 head with the published tensor names; layers behind the first have those of vLLM."""

    config: Eagle3Config
    kind: ClassVar[HeadKind] = "eagle3"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        h, fused = config.hidden_size, TAPS * config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(TAPS)
            )
        self.fc = nn.Linear(fused, h, bias=False)
        self.midlayer = FusionLayer(config, self.rotary, norm_before_residual=config.norm_before_residual)
        self.layers = nn.ModuleDict(
            {str(number): HiddenLayer(config, self.rotary) for number in range(1, config.num_hidden_layers)}
        )
        self.norm = RMSNorm(h, config.rms_norm_eps)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
        # Until set_vocabulary is called, the first Vd target ids.
        self.d2t = nn.Buffer(torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.t2d = nn.Buffer(torch.arange(config.vocab_size) < config.draft_vocab_size)

    def set_vocabulary(self, draft_ids: Tensor) -> None:
        """Make ``draft_ids`` (int64 [Vd], distinct target ids in ascending order) the draft vocabulary.

        ``d2t`` holds offsets, ``target_id = draft_id + d2t[draft_id]``; ``t2d`` marks the target ids covered.

        Raises:
            ValueError: the ids are not Vd distinct, ascending ids of the target.
        """
        size = self.config.draft_vocab_size
        check_vocabulary(draft_ids, size, self.config.vocab_size)
        draft_ids = draft_ids.to(self.d2t.device)
        self.d2t.copy_(draft_ids - torch.arange(size, device=draft_ids.device))
        self.t2d.zero_()
        self.t2d[draft_ids] = True

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 [Vd], ascending."""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    @property
    def layers_in_order(self) -> Sequence[DraftLayer]:
        return [self.midlayer, *self.layers.values()]  # type: ignore[list-item]

    def fuse(self, state: Tensor) -> Tensor:
        """Target states [..., 3h] (low, mid, high) to the head's width [..., h]. Never applied to drafted
        states."""
        if self.config.norm_before_fc:
            state = self.input_norm(state)
        if self.config.fc_norm:
            parts = state.chunk(TAPS, dim=-1)
            state = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(state)

    def enter(self, embeds: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.enter(embeds, feature)

    def feedback(self, hidden: Tensor) -> Tensor:
        """The state before the final norm, or with ``norm_output`` the one after it."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def scored(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)
