"""The draft vocabulary of a head from elsewhere, which may be stored as offsets or as the ids themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.errors import EagleError


def draft_ids(d2t: Tensor, t2d: Tensor | None, vocab_size: int, where: str) -> Tensor:
    """Target ids of the draft vocabulary, int64 [Vd], in the order of the head's outputs.

    Args:
        d2t: [Vd]; what engines add to a draft id, or (from some trainers) the target id itself.
        t2d: [V], true at the target ids that are covered; which reading of `d2t` is meant is seen from it.
        where: the file, for messages.

    Raises:
        EagleError: neither reading fits, or both do.
    """
    if d2t.dim() != 1 or d2t.is_floating_point():
        raise EagleError(
            f"{where}: d2t is {d2t.dtype} of shape {tuple(d2t.shape)}, not one integer a draft token"
        )
    readings = {"offsets": d2t.long() + torch.arange(len(d2t)), "ids": d2t.long()}
    fitting = {name: ids for name, ids in readings.items() if _fits(ids, t2d, vocab_size, where)}
    if len(fitting) == 2 and torch.equal(*fitting.values()):
        return fitting["offsets"]
    if not fitting:
        what = "the t2d beside it" if t2d is not None else f"a vocabulary of {vocab_size}"
        raise EagleError(
            f"{where}: d2t of {len(d2t)} tokens fits neither as offsets nor as ids {what}: the head is "
            "damaged, or its config.json is another head's"
        )
    if len(fitting) == 2:
        raise EagleError(
            f"{where}: d2t can be read as offsets and as ids, and there is no t2d to tell: add the head's t2d"
        )
    (ids,) = fitting.values()
    return ids


def _fits(ids: Tensor, t2d: Tensor | None, vocab_size: int, where: str) -> bool:
    if len(ids) == 0 or ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) != len(ids):
        return False
    if t2d is None:
        return bool((ids.diff() > 0).all())
    if t2d.shape != (vocab_size,):
        raise EagleError(f"{where}: t2d has shape {tuple(t2d.shape)}, and the vocabulary is {vocab_size}")
    return torch.equal(ids.sort().values, t2d.bool().nonzero().squeeze(1))
