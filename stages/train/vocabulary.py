"""The draft vocabulary: which of the target's tokens the head can propose."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.errors import EagleError

MULTIPLE = 64
AUTOMATIC_COVERAGE = 0.99
AUTOMATIC_LIMIT = 32_000


@dataclass(frozen=True)
class DraftVocabulary:
    """The target tokens a head can propose.

    Attributes:
        ids: int64 [Vd], distinct target ids in ascending order.
        coverage: share of the counted labels that are among them.
    """

    ids: Tensor
    coverage: float

    @classmethod
    def of(cls, ids: Tensor, label_counts: Tensor) -> DraftVocabulary:
        """These ids, and what they cover of `label_counts` [V]."""
        return cls(ids, int(label_counts[ids].sum()) / max(int(label_counts.sum()), 1))


def choose_vocabulary(label_counts: Tensor, size: int) -> DraftVocabulary:
    """The `size` most frequent labels; among equally frequent ones the lower ids, which tokenizers learn
    first.

    Args:
        label_counts: int64 [V], how often each target token is a supervised label in the training rows.
        size: Vd; 0 takes the smallest multiple of 64 that covers 99 % of the labels, at most 32,000.

    Raises:
        EagleError: more tokens are asked for than the target has.
    """
    total = int(label_counts.sum())
    if size > len(label_counts):
        raise EagleError(
            f"--draft-vocab-size {size} is more than the {len(label_counts)} tokens of the target: "
            "use 0 (automatic)"
        )
    frequency, by_frequency = label_counts.sort(descending=True, stable=True)
    covered = frequency.cumsum(0)
    if size == 0:
        needed = int((covered < math.ceil(AUTOMATIC_COVERAGE * total)).sum()) + 1
        size = min(math.ceil(needed / MULTIPLE) * MULTIPLE, AUTOMATIC_LIMIT, len(label_counts))
    return DraftVocabulary.of(by_frequency[:size].sort().values, label_counts)


def draft_labels(target_ids: Tensor, draft_ids: Tensor) -> Tensor:
    """Draft ids of target ids, int64, same shape; -1 for those outside the draft vocabulary (int64 [Vd],
    ascending).
    """
    target_ids = target_ids.to(draft_ids.dtype)
    at = torch.searchsorted(draft_ids, target_ids).clamp(max=len(draft_ids) - 1)
    return torch.where(draft_ids[at] == target_ids, at, -1)
