"""EAGLE-3's unroll: a chain over the fused features, on whose states no loss lies but that of the tokens."""

from __future__ import annotations

import torch

from stages.heads import Eagle3Head
from stages.train.batch import TttBatch
from stages.train.unroll.chain import unroll_chain
from stages.train.unroll.unrolled import Unrolled


def unroll_eagle3(head: Eagle3Head, batch: TttBatch, steps: int) -> Unrolled:
    hidden = unroll_chain(head, batch, batch.aux, steps)
    return Unrolled(head.scored(torch.stack(hidden)), head.lm_head.weight)
