"""A batch of conversations, laid end to end, with what each draft step of each query is fed and asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from stages.features.layout import FeatureRow
from stages.train.attention import RowGroup, group_rows


@dataclass(frozen=True)
class TttBatch:
    """N key tokens and Q queries of B rows, without padding.

    The key at index j of a row holds the pair (f_j, x_{j+1}). A query is an index j that predicts: the row's
    supervised position p = j+1 has a target distribution `last[p]` over x_{j+2}. Queries are in the order of
    the supervised positions, so draft step i of query q asks for the distribution of position q+i, if
    `counted[i, q]`.
    """

    aux: Tensor  # [N, 3h]
    tokens: Tensor  # [N] int64, x_{j+1}
    positions: Tensor  # [N] int64, j
    queries: Tensor  # [Q] int64, indices into the N keys
    step_tokens: Tensor  # [S, Q] int64, x_{j+1+i}; 0 where not counted
    counted: Tensor  # [S, Q] bool: x_{j+1} .. x_{j+2+i} are response tokens of one turn
    last: Tensor  # [Q, h], target's state after the final norm at p = j+1
    target_argmax: Tensor  # [Q] int64
    groups: tuple[RowGroup, ...]
    last_keys: Tensor | None = None  # [N, h], target's state after the final norm at j; where rows have it

    @property
    def supervised(self) -> int:
        """Supervised positions, Q."""
        return len(self.queries)

    @property
    def turns(self) -> list[int]:
        """Queries in each turn, in order: in one turn of a row, each query is the next key."""
        positions = self.positions[self.queries]
        ends = (self.queries.diff() != 1) | (positions.diff() != 1)
        bounds = [0, *(ends.nonzero().squeeze(1) + 1).tolist(), self.supervised]
        return [end - start for start, end in pairwise(bounds)]

    def to(self, device: torch.device, dtype: torch.dtype) -> TttBatch:
        """The batch on a device, features in `dtype`; a GPU copies from pinned memory while it computes."""
        if device.type == "cuda":
            return self._pinned()._moved(device, dtype)
        return self._moved(device, dtype)

    def _moved(self, device: torch.device, dtype: torch.dtype) -> TttBatch:
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _INDICES}
        return replace(
            self,
            aux=self.aux.to(device, dtype, non_blocking=True),
            last=self.last.to(device, dtype, non_blocking=True),
            last_keys=None if self.last_keys is None else self.last_keys.to(device, dtype),
            groups=tuple(group.to(device) for group in self.groups),
            **moved,
        )

    def _pinned(self) -> TttBatch:
        pinned = {name: getattr(self, name).pin_memory() for name in ("aux", "last", *_INDICES)}
        return replace(self, **pinned)


_INDICES = ("tokens", "positions", "queries", "step_tokens", "counted", "target_argmax")


def collate(rows: Sequence[FeatureRow], steps: int) -> TttBatch:
    """Lays rows end to end, longest first; every row has at least one supervised position.

    A row's keys end at its last query: a key further on is seen by no query.
    """
    rows = sorted(rows, key=lambda row: int(row.supervised[-1]), reverse=True)
    supervised = [row.supervised for row in rows]
    keys = [int(positions[-1]) for positions in supervised]  # indices 0 .. p-1
    starts = torch.tensor([0, *keys]).cumsum(0).tolist()
    every_last = [row.every_last for row in rows]
    tables = [_step_table(row, positions, steps) for row, positions in zip(rows, supervised, strict=True)]
    return TttBatch(
        aux=torch.cat([row.aux[:n] for row, n in zip(rows, keys, strict=True)]),
        tokens=torch.cat([row.input_ids[1 : n + 1] for row, n in zip(rows, keys, strict=True)]).long(),
        positions=torch.cat([torch.arange(n) for n in keys]),
        queries=torch.cat([start + p - 1 for start, p in zip(starts, supervised, strict=False)]),
        step_tokens=torch.cat([tokens for tokens, _ in tables], dim=1),
        counted=torch.cat([counted for _, counted in tables], dim=1),
        last=torch.cat([row.last for row in rows]),
        target_argmax=torch.cat([row.target_argmax for row in rows]).long(),
        groups=group_rows(keys, [positions - 1 for positions in supervised]),
        last_keys=_first(every_last, keys),
    )


def _first(states: Sequence[Tensor | None], keys: Sequence[int]) -> Tensor | None:
    """The first states of each row, end to end; None if a row has none."""
    present = [state[:n] for state, n in zip(states, keys, strict=True) if state is not None]
    return torch.cat(present) if len(present) == len(states) else None


def _step_table(row: FeatureRow, positions: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """`step_tokens` and `counted`, [S, s] each, of one row with supervised positions [s].

    Positions p and p+i are of one turn if and only if the i-th supervised position after p is p+i: then every
    position between them is supervised too.
    """
    ids = row.input_ids.long()
    step = torch.arange(steps)[:, None]
    asked = torch.arange(len(positions)) + step  # [S, s]: index of p+i among the supervised, if it is one
    counted = asked < len(positions)
    counted &= positions[asked.clamp(max=len(positions) - 1)] == positions + step
    tokens = ids[(positions + step).clamp(max=len(ids) - 1)]
    return tokens.where(counted, 0), counted
