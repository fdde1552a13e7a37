"""Medusa's unroll: every head's guess from the target's last state, no chain between them (arXiv 2401.10774).

Step i is head i: at index j it is given f_j and predicts x_{j+2+i}.
"""

from __future__ import annotations

from stages.errors import EagleError
from stages.heads import MedusaHead
from stages.train.batch import TttBatch
from stages.train.unroll.unrolled import Unrolled, last_states


def unroll_medusa(head: MedusaHead, batch: TttBatch, steps: int) -> Unrolled:
    """Guesses of the first `steps` heads.

    Raises:
        EagleError: the batch lacks the target's last states at its keys, or the heads have an output layer
            each.
    """
    if not head.config.shared_output:
        raise EagleError(
            "these Medusa heads have an output layer each, and eagle trains those that share the target's: "
            "start without them"
        )
    if steps > head.config.heads:
        raise ValueError(f"{steps} steps of {head.config.heads} Medusa heads")
    states = head(last_states(head.kind, batch)[batch.queries])[:steps]  # [S, Q, h]
    return Unrolled(head.scored(states), head.lm_head.weight)
