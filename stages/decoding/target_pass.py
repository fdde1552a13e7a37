"""Passes of the target over sequences in slots, their prompts and trees, and the tokens drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kernels import draw_tokens, first_argmax
from stages.decoding.logprobs import TokenLogprobs, token_logprobs
from stages.decoding.row_tensors import Place, RowBuffers, row_tensors, whole_numbers
from stages.decoding.running import Running
from stages.decoding.sampling import DrawKey, SamplingTensors, process_logits
from stages.decoding.tree import DraftTree
from stages.decoding.walk import padded_tree
from stages.targets import SlotForward, SlotStep, TargetStates


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

    def verify(self, running: Sequence[Running], trees: Sequence[DraftTree], *, tap: bool) -> TargetStates:
        """States of all nodes, tree after tree."""
        if self._forward.takes_rows:
            tokens: list[int] = []
            positions: list[int] = []
            places: list[Place] = []
            longest = 0
            for sequence, tree in zip(running, trees, strict=True):
                stored, slot = sequence.stored, sequence.slot
                longest = max(longest, stored + len(tree.tokens))
                tokens += tree.tokens
                positions += [stored + depth for depth in tree.depths]
                places += [(slot, stored + i, stored, word) for i, word in enumerate(tree.ancestors())]
            self.cache.reserve(longest)
            return self._forward.rows(*self._rows.fill(tokens, positions, places), tap=tap)
        sizes = [len(tree.tokens) for tree in trees]
        self.cache.reserve(max(s.stored + size for s, size in zip(running, sizes, strict=True)))
        most = max(sizes)
        padded = [padded_tree(tree, most) for tree in trees]
        ids = self._tensor([tree.tokens for tree in padded])
        lengths = [s.stored for s in running]
        at = self._tensor([[n + d for d in t.depths] for n, t in zip(lengths, padded, strict=True)])
        slots, words = [s.slot for s in running], self._tensor([t.ancestors() for t in padded])
        step = SlotStep.tree(self.cache, slots, lengths, words)
        states = self._forward(ids, at, step, tap=tap)
        real = self._tensor([b * most + i for b, size in enumerate(sizes) for i in range(size)])
        features = states.features
        return TargetStates(
            states.last.flatten(0, 1)[real],
            None if features is None else features.flatten(0, 1)[real],
        )

    def draw(
        self, last: Tensor, sequences: Sequence[Running], trees: Sequence[DraftTree | None]
    ) -> tuple[Tensor | None, list[int]]:
        """The target's logits [M, V] and its own token at every node, from states [M, h].

        Args:
            trees: None stands for a prompt's last token.

        Returns:
            No logits where nobody wants them and they need not be made.
        """
        output = None if any(s.params.needs_logits for s in sequences) else self._forward.output
        greedy = all(s.params.temperature == 0 for s in sequences)
        if output is not None and greedy:
            return None, output.argmax(last)
        sizes = [1 if tree is None else len(tree.tokens) for tree in trees]
        keys = [s.params.draw_key for s in sequences]
        behind = [
            s.stored + d + (tree is not None)
            for s, tree in zip(sequences, trees, strict=True)
            for d in ((0,) if tree is None else tree.depths)
        ]
        if output is not None and all(key.temperature > 0 and not key.filters for key in keys):
            rows = [key for key, size in zip(keys, sizes, strict=True) for _ in range(size)]
            found = output.draw(
                last,
                [key.temperature for key in rows],
                [key.seed for key in rows],
                [key.sample for key in rows],
                behind,
            )
            if min(found) >= 0:
                return None, found
        logits = raw = self._forward.logits(last)  # [M, V]
        if any(s.params.adjusts for s in sequences):
            logits = logits.float()
            pieces = []
            for s, tree, part in zip(sequences, trees, logits.split(sizes), strict=True):
                shown = None if tree is None else [tree]
                pieces.append(process_logits(part[None], [s.params], [s.history], shown)[0])
            logits = torch.cat(pieces)
        if greedy:
            return raw, first_argmax(logits).tolist()
        to = _keys(tuple(zip(keys, sizes, strict=True)), last.device)
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
