"""Passes of the target over sequences in slots, their prompts and trees, and the tokens drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import add

import torch
from torch import Tensor

from kernels import draw_tokens, first_argmax
from kernels.cpu import Drawing
from stages.decoding.logprobs import TokenLogprobs, token_logprobs
from stages.decoding.row_tensors import PlacedRows, RowBuffers, row_tensors, whole_numbers
from stages.decoding.running import Running
from stages.decoding.sampling import DrawKey, SamplingTensors, process_logits
from stages.decoding.tree import DraftTree
from stages.decoding.walk import padded_tree
from stages.targets import SlotForward, SlotStep, TargetStates

_GREEDY = Drawing()


class TargetPass:
    """Runs a target over what the sequences of an engine bring.

    On a CPU with its ops the tokens of all are rows of one forward; elsewhere trees are padded to one size,
    and prompts are read one at a time.

    Args of its methods:
        tap: whether the states come with the features.
    """

    def __init__(self, forward: SlotForward, device: torch.device) -> None:
        self.cache = forward.cache
        self._forward = forward
        self._device = device
        self._rows = RowBuffers()

    def read(self, pieces: Sequence[tuple[Running, int]], *, tap: bool) -> TargetStates:
        """States of the next tokens of prompts, so many of each, piece after piece: [sum of sizes, ...].

        Where rows are not taken, a single piece.
        """
        self.cache.reserve(max(s.read + size for s, size in pieces))
        tokens = [t for s, size in pieces for t in s.request.prompt_ids[s.read : s.read + size]]
        positions = [p for s, size in pieces for p in range(s.read, s.read + size)]
        if self._forward.takes_rows:
            places = [(s.slot, p, p, 1) for s, size in pieces for p in range(s.read, s.read + size)]
            return self._forward.rows(*row_tensors(tokens, positions, places, self._device), tap=tap)
        ids, at = self._tensor(tokens), self._tensor(positions)
        (sequence, size), *_ = pieces
        step = SlotStep.causal(self.cache, sequence.slot, [sequence.read], size)
        states = self._forward(ids[None], at[None], step, tap=tap)
        return TargetStates(states.last[0], None if states.features is None else states.features[0])

    def verify(
        self,
        running: Sequence[Running],
        trees: Sequence[DraftTree],
        *,
        tap: bool,
        rows: PlacedRows | None = None,
    ) -> tuple[TargetStates, Tensor | None, list[int]]:
        """States of all nodes, tree after tree, and logits and tokens as of ``draw``.

        Args:
            rows: of these trees; those made for prefixes of another length are not looked at.
        """
        lengths = [sequence.stored for sequence in running]
        sizes = [len(tree.tokens) for tree in trees]
        self.cache.reserve(max(map(add, lengths, sizes)))
        if self._forward.takes_rows:
            if rows is None or rows.lengths != lengths:
                rows = self._rows.of_trees([s.slot for s in running], lengths, trees)
            drawing = self._drawing(running, sizes)
            states = self._forward.rows(*rows[1:], tap=tap, drawing=drawing)
            if states.drawn is not None and min(states.drawn) >= 0:
                return states, None, states.drawn
            return states, *self._from_logits(states.last, running, trees, sizes)
        most = max(sizes)
        padded = [padded_tree(tree, most) for tree in trees]
        ids = self._tensor([tree.tokens for tree in padded])
        at = self._tensor([[n + d for d in t.depths] for n, t in zip(lengths, padded, strict=True)])
        slots, words = [s.slot for s in running], self._tensor([t.ancestors() for t in padded])
        step = SlotStep.tree(self.cache, slots, lengths, words)
        states = self._forward(ids, at, step, tap=tap)
        real = self._tensor([b * most + i for b, size in enumerate(sizes) for i in range(size)])
        features = states.features
        states = TargetStates(
            states.last.flatten(0, 1)[real],
            None if features is None else features.flatten(0, 1)[real],
        )
        return states, *self._from_logits(states.last, running, trees, sizes)

    def draw(self, last: Tensor, sequences: Sequence[Running]) -> tuple[Tensor | None, list[int]]:
        """The target's logits [B, V] and its own token behind each prompt, from the states [B, h] of their
        last tokens.

        Returns:
            No logits where nobody wants them and they need not be made.
        """
        sizes = [1] * len(sequences)
        if drawing := self._drawing(sequences, sizes):
            drawn = self._forward.draw(last, drawing, [s.stored for s in sequences])
            if min(drawn) >= 0:
                return None, drawn
        return self._from_logits(last, sequences, None, sizes)

    def _drawing(self, sequences: Sequence[Running], sizes: Sequence[int]) -> Drawing | None:
        """How all tokens can be drawn without logits, if they can."""
        if not self._forward.draws or any(s.params.needs_logits for s in sequences):
            return None
        keys = [s.params.draw_key for s in sequences]
        if all(key.temperature == 0 for key in keys):
            return _GREEDY
        if any(key.temperature == 0 or key.filters for key in keys):
            return None
        if len(keys) > 1:
            keys = [key for key, size in zip(keys, sizes, strict=True) for _ in range(size)]
        return Drawing([k.temperature for k in keys], [k.seed for k in keys], [k.sample for k in keys])

    def _from_logits(
        self,
        last: Tensor,
        sequences: Sequence[Running],
        trees: Sequence[DraftTree] | None,
        sizes: Sequence[int],
    ) -> tuple[Tensor, list[int]]:
        """Logits [M, V] and the token drawn from each; without trees of prompts."""
        logits = raw = self._forward.logits(last)
        if any(s.params.adjusts for s in sequences):
            logits = logits.float()
            pieces = []
            for b, (s, part) in enumerate(zip(sequences, logits.split(list(sizes)), strict=True)):
                shown = None if trees is None else [trees[b]]
                pieces.append(process_logits(part[None], [s.params], [s.history], shown)[0])
            logits = torch.cat(pieces)
        if all(s.params.temperature == 0 for s in sequences):
            return raw, first_argmax(logits).tolist()
        keys = [s.params.draw_key for s in sequences]
        to = _keys(tuple(zip(keys, sizes, strict=True)), last.device)
        if trees is None:
            behind = [s.stored for s in sequences]
        else:
            behind = [s.stored + d + 1 for s, t in zip(sequences, trees, strict=True) for d in t.depths]
        at = whole_numbers(behind, self._device)
        drawn = draw_tokens(logits, at, to.temperature, to.seed, to.sample, filters=to.filters)
        return raw, drawn.tolist()

    def keep(self, moved: Sequence[tuple[int, int, list[int]]]) -> None:
        """Make accepted nodes part of the stable prefixes; those that lie there already are left alone."""
        moved = [(slot, stored, path) for slot, stored, path in moved if path[-1] != len(path) - 1]
        if moved:
            self.cache.keep_paths(moved)

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


@lru_cache(maxsize=256)
def _keys(drawn: tuple[tuple[DrawKey, int], ...], device: torch.device) -> SamplingTensors:
    """Of every row, from each sequence's key and its rows; kept, as the next cycle often has the same."""
    return SamplingTensors.of([key for key, rows in drawn for _ in range(rows)], device)


def tell(
    logits: Tensor, sequences: Sequence[Running], walks: Sequence[tuple[list[int], list[int]]]
) -> list[list[TokenLogprobs] | None]:
    """The log-probabilities of each sequence's tokens, drawn from these rows of logits [M, V]; None where
    they are not wanted."""
    wanted = [
        (b, row, token)
        for b, (sequence, (rows, tokens)) in enumerate(zip(sequences, walks, strict=True))
        for row, token in zip(rows, tokens, strict=False)  # an output may end within its path
        if sequence.params.logprobs is not None
    ]
    told: list[list[TokenLogprobs] | None] = [None] * len(sequences)
    if wanted:
        tops = [sequences[b].params.logprobs or 0 for b, _, _ in wanted]
        each = token_logprobs(logits[[row for _, row, _ in wanted]], [token for _, _, token in wanted], tops)
        for (b, _, _), entry in zip(wanted, each, strict=True):
            told[b] = [*(told[b] or []), entry]
    return told
