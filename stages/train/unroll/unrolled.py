"""What a head makes of a batch: what the loss and the measures need to know of it, whatever its kind."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stages.errors import EagleError
from stages.heads import HeadKind
from stages.train.batch import TttBatch


@dataclass(frozen=True)
class Unrolled:
    """Draft states of S steps for each of Q queries; draft logits are `states @ weight.T`."""

    states: Tensor  # [S, Q, h], normed or scaled as the head does before its output layer
    weight: Tensor  # [Vd, h], the head's own parameter, or frozen rows of the target's lm_head
    feature_loss: Tensor | None = (
        None  # scalar, weighted against the token loss; of heads that learn features
    )


def last_states(kind: HeadKind, batch: TttBatch) -> Tensor:
    """The target's state after the final norm at every key, [N, h].

    Raises:
        EagleError: the features have it at supervised positions only.
    """
    if batch.last_keys is None:
        raise EagleError(
            f"a head of kind {kind} learns from the target's last state at every token, and these features "
            "have it at supervised ones only: extract them with --last all"
        )
    return batch.last_keys
