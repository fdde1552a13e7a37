"""Heads that go through the target's own output layer: they keep the rows of their draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stages.heads.eagle1_config import Eagle1Config
from stages.heads.medusa_config import MedusaConfig
from stages.heads.vocabulary import check_vocabulary


class SharedOutput(nn.Module):
    """What EAGLE-1 and Medusa heads do alike. The rows are never trained."""

    config: Eagle1Config | MedusaConfig
    lm_head: nn.Linear

    def share_output(self) -> None:
        """Makes room for the rows; ``init_from_target`` fills them."""
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(False)

    def first_vocabulary(self) -> None:
        """The first ids, until ``set_vocabulary`` is called."""
        self.vocabulary = nn.Buffer(torch.arange(self.config.draft_vocab_size))

    def set_vocabulary(self, draft_ids: Tensor) -> None:
        """Make ``draft_ids`` (int64 [Vd], distinct target ids in ascending order) the draft vocabulary.

        Raises:
            ValueError: the ids are not Vd distinct, ascending ids of the target.
        """
        check_vocabulary(draft_ids, self.config.draft_vocab_size, self.config.vocab_size)
        self.vocabulary.copy_(draft_ids)

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 [Vd], ascending."""
        return self.vocabulary

    def scored(self, hidden: Tensor) -> Tensor:
        """States [..., h] as ``lm_head`` takes them: scaled as the target scales its logits."""
        scale = self.config.logit_scale
        return hidden if scale == 1 else hidden * scale
