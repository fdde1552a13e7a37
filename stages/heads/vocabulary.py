"""Which target tokens a head can propose."""

from __future__ import annotations

from torch import Tensor


def check_vocabulary(draft_ids: Tensor, size: int, vocab_size: int) -> None:
    """Raises ValueError: the ids are not ``size`` distinct, ascending ids below ``vocab_size``."""
    fits = draft_ids.shape == (size,) and not bool((draft_ids.diff() <= 0).any())
    if not fits or (size and (int(draft_ids[0]) < 0 or int(draft_ids[-1]) >= vocab_size)):
        raise ValueError(f"the draft vocabulary must be {size} distinct target ids in ascending order")
