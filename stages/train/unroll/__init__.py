"""A head unrolled over a batch: the states of every draft step of every query, for each kind of head."""

from __future__ import annotations

from stages.heads import DraftHead, Eagle1Head, Eagle3Head
from stages.train.batch import TttBatch
from stages.train.unroll.eagle1 import unroll_eagle1
from stages.train.unroll.eagle3 import unroll_eagle3
from stages.train.unroll.medusa import unroll_medusa
from stages.train.unroll.unrolled import Unrolled

__all__ = ["Unrolled", "unroll"]


def unroll(head: DraftHead, batch: TttBatch, steps: int) -> Unrolled:
    """What `head` drafts at each of `steps` steps from every query of the batch, on true tokens.

    Raises:
        EagleError: the batch lacks what this kind of head learns from.
    """
    if isinstance(head, Eagle3Head):
        return unroll_eagle3(head, batch, steps)
    if isinstance(head, Eagle1Head):
        return unroll_eagle1(head, batch, steps)
    return unroll_medusa(head, batch, steps)
