"""One cycle of many sequences as a function of what the device knows, in one shape, without the host.

    rows     = state[slots]                       the last token, length and keys of each sequence
    trees    = drafts.draft(rows)                 what may follow each last token
    states   = target(all nodes)                  one forward over N nodes of each of B sequences
    accepted = the target's own token at every node, then one walk down each tree
    moved    = the walk, cut at an end, a cap
    keep, drafts.extend, state.advance            what the next cycle starts from
    record   = what has been found                all that the host ever reads

Nothing here asks a tensor for its value, and no shape depends on one: on a GPU the cycle can be captured as a
graph, and launched before the host has read what the last one has found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import Acceptance, accept_states, accept_tree
from stages.decoding.device.drafts import Drafts, Moved
from stages.decoding.device.growth import Trees
from stages.decoding.device.state import DeviceState, Rows
from stages.targets import SlotCache, SlotForward, SlotStep, Target, TargetStates
from stages.targets.target import logit_scale, logit_softcap

_HEADER = 5


@dataclass(frozen=True)
class Found:
    """What one cycle has found for one sequence, as the host reads it.

    root, length: what the cycle started from.
    drafted, levels: nodes verified besides the root, and levels that were drafted.
    tokens: put out; accepted: those of them that were drafted.
    """

    root: int
    length: int
    drafted: int
    levels: int
    accepted: int
    tokens: list[int]

    @classmethod
    def of(cls, record: Sequence[int]) -> Found:
        """One row of a record."""
        root, length, drafted, accepted, emitted = record[:_HEADER]
        tokens = record[_HEADER:]
        levels = len(tokens) - 1 if drafted else 0
        return cls(root, length, drafted, levels, accepted, list(tokens[:emitted]))


class Cycle:
    """The cycle of one target and one way to draft."""

    def __init__(
        self,
        target: Target,
        forward: SlotForward,
        state: DeviceState,
        drafts: Drafts,
        *,
        fused: bool = False,
    ) -> None:
        """``fused``: the target's logits are never stored but where tokens are filtered by rank; needs an
        lm_head without bias. Its sums keep more digits than the lm_head's own, so near-ties may fall
        otherwise."""
        self.state, self.drafts = state, drafts
        self._target, self._forward, self._fused = target, forward, fused

    @property
    def cache(self) -> SlotCache:
        """The target's, with the spare slot."""
        return self._forward.cache

    @property
    def columns(self) -> int:
        """Numbers in a record, a sequence."""
        return _HEADER + self.drafts.depth + 1

    def storage(self) -> tuple[int, ...]:
        """Where its tensors lie."""
        return self.cache.data.data_ptr(), *self.drafts.storage()

    def run(self, slots: Tensor, *, filtered: bool) -> Tensor:
        """Give the sequences in slots int64 [B] their next tokens.

        Args:
            filtered: whether any of them filters tokens by rank or probability.

        Returns:
            The record, int64 [B, columns]; see ``Found``.
        """
        rows = self.state.rows(slots)
        trees = self.drafts.draft(rows).only_where(rows.drafts)
        states = self._verify(rows, trees)
        accepted = self._accept(rows, trees, states.last, filtered)
        moved = cut(rows, trees, accepted, self.drafts.depth + 1)
        self.cache.keep(slots, rows.length, accepted.path, moved.emitted)
        wanted = {"none": None, "aux": states.features, "last": states.last}[self.drafts.state]
        self.drafts.extend(rows, wanted, moved)
        self.state.advance(slots, *_next(rows, moved))
        header = (rows.root, rows.length, trees.drafted, moved.accepted, moved.emitted)
        return torch.cat((torch.stack(header, 1), moved.tokens), 1)

    def _verify(self, rows: Rows, trees: Trees) -> TargetStates:
        """States [B, N, ...] of all nodes."""
        # Nodes beyond the context can be drafted, but nothing of theirs is put out.
        positions = (rows.length[:, None] + trees.depths).clamp(0, self._target.max_length - 1)
        step = SlotStep.static(self.cache, rows.slots, rows.length, trees.words)
        tap = self.drafts.state == "aux"
        return self._forward(trees.tokens.clamp(min=0), positions, step, tap=tap)

    def _accept(self, rows: Rows, trees: Trees, last: Tensor, filtered: bool) -> Acceptance:
        keys = (
            trees.tokens,
            trees.parents,
            rows.length[:, None] + trees.depths,
            rows.temperature,
            rows.seed,
            rows.sample,
        )
        if not self._fused:
            return accept_tree(self._forward.logits(last), *keys, filters=rows.filters if filtered else None)
        config = self._target.config
        whole = accept_states(
            last,
            self._target.model.get_output_embeddings().weight,
            *keys,
            scale=logit_scale(config),
            softcap=logit_softcap(config),
        )
        if not filtered:
            return whole
        # What a sequence draws must not depend on the others: those without filters stay with the fused head.
        apart = accept_tree(self._forward.logits(last), *keys, filters=rows.filters)
        filters = rows.filters
        few = (filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0)
        return Acceptance(
            path=torch.where(few[:, None], apart.path, whole.path),
            count=torch.where(few, apart.count, whole.count),
            token=torch.where(few, apart.token, whole.token),
            drawn=torch.where(few[:, None], apart.drawn, whole.drawn),
        )


def cut(rows: Rows, trees: Trees, accepted: Acceptance, columns: int) -> Moved:
    """What is put out of an accepted path: up to the first token that ends the output, and no more than is
    left. Of ``columns`` levels."""
    path = accepted.path[:, :columns].clamp(min=0)  # [B, A]
    column = torch.arange(columns, device=path.device)
    count = accepted.count[:, None]
    drafted = trees.tokens.gather(1, path).roll(-1, dims=1)  # of the node below
    tokens = torch.where(column + 1 < count, drafted, accepted.token[:, None])
    ends = (tokens[..., None] == rows.ends[:, None]).any(-1) & (column < count)
    until = torch.where(ends, column + 1, columns).amin(1)
    emitted = torch.minimum(torch.minimum(accepted.count, until), rows.left)
    return Moved(path, tokens, emitted, torch.minimum(accepted.count - 1, emitted))


def _next(rows: Rows, moved: Moved) -> tuple[Tensor, Tensor, Tensor]:
    """Root, length and what is left, int64 [B] each; those of a sequence that has ended stay."""
    last = moved.tokens.gather(1, (moved.emitted - 1).clamp(min=0)[:, None])[:, 0]
    going = moved.emitted > 0
    root = torch.where(going, last, rows.root)
    ended = going & (last[:, None] == rows.ends).any(1)
    left = torch.where(ended, 0, rows.left - moved.emitted)
    return root, rows.length + moved.emitted, left
