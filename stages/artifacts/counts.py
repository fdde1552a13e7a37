"""Adding up what several shards or parts counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def add_counts(counts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of counts by name, and below a name likewise; a name that only some have counts as 0 elsewhere.

    Raises:
        ValueError: a name has a number in one and counts below it in another.
    """
    total: dict[str, Any] = {}
    for each in counts:
        for name, value in each.items():
            known = total.get(name)
            if isinstance(value, Mapping) != isinstance(known, Mapping) and known is not None:
                raise ValueError(f"{name} is a number in one and counts in another")
            if isinstance(value, Mapping):
                total[name] = add_counts([known or {}, value])
            else:
                total[name] = value if known is None else known + value
    return total
