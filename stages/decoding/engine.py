"""The decode loop over many sequences: draft, verify, keep what the target agrees with.

Sequences join and leave between steps. A step first runs a piece of the prompts that wait to be read, so that
a long one does not hold up the others, and then one cycle of all running sequences:

    trees  = drafter.propose()            what may follow each sequence's last token; none is plain decoding
    states = target(all trees' nodes)     one forward, each node seeing its sequence and its ancestors
    drawn  = the target's own token at every node, then one walk down each tree
    keep, drafter.extend                  accepted rows become the prefix, their true states feed the head

Plain decoding is the same loop with trees of one node. What a sequence puts out is a function of its prompt
and parameters alone. On a CPU with its ops the nodes of all trees are rows of one forward, without padding,
and slots are any; elsewhere trees are padded to one size and running sequences hold the first slots.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kernels import accept_tree, first_argmax
from stages.decoding.cost import Costs, Planner
from stages.decoding.drafters import Drafter
from stages.decoding.measure import measure_costs
from stages.decoding.sampling import SamplingParams, SamplingTensors, TokenHistory, process_logits
from stages.decoding.stats import DecodeStats
from stages.decoding.tree import DraftTree, TreePlan
from stages.errors import EagleError
from stages.targets import SlotCache, SlotForward, SlotStep, Target, TargetStates

PREFILL_ROWS = 512
"""Prompt tokens that a step reads at most."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to answer; ``id`` is the caller's."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Emission:
    """Tokens that a step has added to one sequence's output; ``finish_reason`` is set with the last ones."""

    id: str
    tokens: list[int]
    finish_reason: FinishReason | None
    stats: DecodeStats


@dataclass(eq=False)
class _Sequence:
    """A request under way.

    read: prompt tokens that the target has run.
    output: tokens so far; the last is the root of the next tree and not in the cache yet.
    """

    request: GenerationRequest
    cap: int
    end_ids: frozenset[int]
    drafts: bool
    slot: int = -1
    read: int = 0
    output: list[int] = field(default_factory=list)
    history: TokenHistory | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def stored(self) -> int:
        """Rows of the stable prefix: everything but the root."""
        return len(self.request.prompt_ids) + len(self.output) - 1 if self.output else self.read

    @property
    def left(self) -> int:
        """Tokens that may be drafted: the target adds one of its own."""
        return self.cap - len(self.output) - 1

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.output and self.output[-1] in self.end_ids:
            return "stop"
        return "length" if len(self.output) >= self.cap else None


class Engine:
    """Decodes up to ``slots`` sequences together, plainly or with a drafter. Not safe for several threads."""

    def __init__(
        self,
        target: Target,
        *,
        slots: int = 1,
        layers: tuple[int, int, int] | None = None,
        drafter: Drafter | None = None,
        planner: Planner | None = None,
    ) -> None:
        """Args:
        layers: feature layers, for a drafter that wants features.
        planner: says what to draft; goes with a drafter.
        """
        self.target = target
        self.drafter, self.planner = drafter, planner
        self.cache = SlotCache.for_model(
            target.config, slots=slots, rows=1, dtype=target.dtype, device=target.device
        )
        self._forward = SlotForward(target, self.cache, layers=layers)
        self._waiting: deque[_Sequence] = deque()
        self._reading: list[_Sequence] = []
        self._running: list[_Sequence] = []

    def measure_costs(self) -> Costs:
        """Of this target and drafter on this machine; nothing may be running."""
        return measure_costs(self.target, self._forward, self._drafting())

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._waiting or self._reading or self._running)

    @property
    def room(self) -> int:
        """Slots that nothing waits for."""
        return max(0, self.cache.slots - len(self._running) - len(self._reading) - len(self._waiting))

    def submit(self, request: GenerationRequest, *, drafts: bool = True) -> None:
        """Queue a request; without ``drafts`` it is decoded plainly.

        Raises:
            EagleError: the prompt is empty, has ids that the target lacks, or leaves no room for a token in
                the target's context.
        """
        size = len(request.prompt_ids)
        if not 0 < size < self.target.max_length:
            raise EagleError(
                f"the prompt {request.id} has {size} tokens; the target takes 1 to "
                f"{self.target.max_length - 1}"
            )
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self.target.vocab_size:
            raise EagleError(
                f"the prompt {request.id} has ids outside the target's 0 to {self.target.vocab_size - 1}"
            )
        params = request.params
        cap = min(params.max_new_tokens, self.target.max_length - size)
        ends = params.end_ids(self.target.eos_ids)
        history = TokenHistory(request.prompt_ids) if params.adjusts else None
        drafting = drafts and self.drafter is not None
        self._waiting.append(_Sequence(request, cap, ends, drafting, history=history))

    def cancel(self, request_id: str) -> None:
        """Drop a request, whatever state it is in; an unknown one is ignored."""
        self._waiting = deque(s for s in self._waiting if s.request.id != request_id)
        self._reading = [s for s in self._reading if s.request.id != request_id]
        for sequence in [s for s in self._running if s.request.id == request_id]:
            self._release(sequence)

    @torch.inference_mode()
    def step(self) -> list[Emission]:
        """Read a piece of the waiting prompts and give every running sequence its next tokens."""
        self._admit()
        emissions = self._read() if self._reading else []
        if self._running:
            emissions += self._cycle()
        return emissions

    def _admit(self) -> None:
        taken = {s.slot for s in (*self._running, *self._reading)}
        free = (slot for slot in range(self.cache.slots) if slot not in taken)
        while self._waiting and (slot := next(free, None)) is not None:
            sequence = self._waiting.popleft()
            sequence.slot = slot
            if sequence.drafts:
                self._drafting().start(slot, sequence.request.prompt_ids, sequence.params)
                if self.planner is not None:
                    self.planner.start(slot)
            self._reading.append(sequence)

    # ---- prompts ----

    def _read(self) -> list[Emission]:
        """Run the next tokens of the prompts that are being read, the first come first."""
        began = time.perf_counter()
        pieces: list[tuple[_Sequence, int]] = []
        budget = PREFILL_ROWS
        for sequence in self._reading:
            size = min(budget, len(sequence.request.prompt_ids) - sequence.read)
            if size:
                pieces.append((sequence, size))
            budget -= size
            if not self._forward.takes_rows:
                break  # one at a time: a padded batch would have to be a run of slots
        states = self._run_pieces(pieces)
        begin, done, rows = 0, [], []
        for sequence, size in pieces:
            end = begin + size
            prompt, read = sequence.request.prompt_ids, sequence.read + size
            sequence.read = read
            if read == len(prompt):
                done.append(sequence)
                rows.append(end - 1)
            begin = end
        drawn = self._draw(states.last[rows], done, [None] * len(done)) if done else []
        first = dict(zip(map(id, done), drawn, strict=True))
        begin = 0
        for sequence, size in pieces:
            prompt, at = sequence.request.prompt_ids, sequence.read - size
            following = prompt[at + 1 : sequence.read + 1]
            if id(sequence) in first:
                following.append(first[id(sequence)])
            if sequence.drafts:
                wanted = self._wanted(states)
                piece = None if wanted is None else wanted[begin : begin + size]
                self._drafting().extend([sequence.slot], piece, [following])
            begin += size
        spent = time.perf_counter() - began
        for sequence, _ in pieces:
            sequence.stats.prefill_s += spent
        emissions = []
        for sequence in done:
            self._reading.remove(sequence)
            self._place(sequence)
            emissions += self._emit(sequence, [first[id(sequence)]])
        self._release_finished(done)
        return emissions

    def _run_pieces(self, pieces: Sequence[tuple[_Sequence, int]]) -> TargetStates:
        """States of the pieces' tokens, piece after piece: [sum of sizes, ...]."""
        tap = any(s.drafts for s, _ in pieces) and self._drafting().state == "aux"
        self.cache.reserve(max(s.read + size for s, size in pieces))
        tokens = [t for s, size in pieces for t in s.request.prompt_ids[s.read : s.read + size]]
        positions = [p for s, size in pieces for p in range(s.read, s.read + size)]
        ids, at = self._tensor(tokens), self._tensor(positions)
        if self._forward.takes_rows:
            places = [(s.slot, p, p, 1) for s, size in pieces for p in range(s.read, s.read + size)]
            return self._forward.rows(ids, at, self._tensor(places), tap=tap)
        (sequence, size), *_ = pieces
        step = SlotStep.causal(self.cache, sequence.slot, [sequence.read], size)
        states = self._forward(ids[None], at[None], step, tap=tap)
        return TargetStates(states.last[0], None if states.features is None else states.features[0])

    def _place(self, sequence: _Sequence) -> None:
        """Let a sequence run; padded batches want it in the next slot of the run."""
        if not self._forward.takes_rows and sequence.slot != len(self._running):
            self._swap(sequence, len(self._running))
        self._running.append(sequence)

    def _swap(self, sequence: _Sequence, slot: int) -> None:
        """Move a sequence to a slot that nothing runs in; one that is read there starts anew elsewhere."""
        for other in self._reading:
            if other.slot == slot:
                other.slot, other.read = sequence.slot, 0
                self._move(sequence, slot)
                if other.drafts:
                    self._drafting().start(other.slot, other.request.prompt_ids, other.params)
                return
        self._move(sequence, slot)

    def _move(self, sequence: _Sequence, slot: int) -> None:
        self.cache.move(sequence.slot, slot, sequence.stored)
        if sequence.drafts:
            self._drafting().move(sequence.slot, slot)
            if self.planner is not None:
                self.planner.move(sequence.slot, slot)
        sequence.slot = slot

    # ---- cycles ----

    def _cycle(self) -> list[Emission]:
        began = time.perf_counter()
        running = list(self._running)
        trees = self._propose(running)
        drafted = time.perf_counter()
        states = self._verify(running, trees)
        drawn = self._draw(states.last, running, trees)
        walks, begin = [], 0
        for sequence, tree in zip(running, trees, strict=True):
            path, bonus = _walk(tree, drawn[begin : begin + len(tree.tokens)])
            tokens = _until_end([tree.tokens[n] for n in path[1:]] + [bonus], sequence.end_ids)
            walks.append((begin, path, tokens[: sequence.cap - len(sequence.output)]))
            begin += len(tree.tokens)
        verified = time.perf_counter()
        for sequence, tree, (_, path, tokens) in zip(running, trees, walks, strict=True):
            sequence.stats.count(tree, len(tokens), min(len(path) - 1, len(tokens)))
        self._observe(running, trees, walks, drafted - began, verified - drafted)
        emissions, kept = [], []
        for sequence, (begin, path, tokens) in zip(running, walks, strict=True):
            stored = sequence.stored
            emissions += self._emit(sequence, tokens)
            if sequence.finish_reason is None:
                kept.append((sequence, stored, begin, path, tokens))
        self._keep([(s.slot, stored, path) for s, stored, _, path, _ in kept])
        self._extend([(s, begin, path, tokens) for s, _, begin, path, tokens in kept if s.drafts], states)
        self._release_finished(running)  # last, as it moves rows of others
        now = time.perf_counter()
        for sequence in running:
            stats = sequence.stats
            stats.draft_s += (drafted - began) + (now - verified)
            stats.verify_s += verified - drafted
            stats.decode_s += now - began
        return emissions

    def _propose(self, running: Sequence[_Sequence]) -> list[DraftTree]:
        drafting = [s for s in running if s.drafts]
        found: dict[int, DraftTree] = {}
        if drafting:
            assert self.planner is not None
            slots = [s.slot for s in drafting]
            plans: list[TreePlan] = self.planner.plan(slots, [s.left for s in drafting])
            found = dict(zip(slots, self._drafting().propose(slots, plans), strict=True))
        return [found.get(s.slot) or DraftTree.root_only(s.output[-1]) for s in running]

    def _verify(self, running: Sequence[_Sequence], trees: Sequence[DraftTree]) -> TargetStates:
        """States of all nodes, tree after tree."""
        tap = any(s.drafts for s in running) and self._drafting().state == "aux"
        sizes = [len(tree.tokens) for tree in trees]
        self.cache.reserve(max(s.stored + size for s, size in zip(running, sizes, strict=True)))
        if self._forward.takes_rows:
            tokens = [t for tree in trees for t in tree.tokens]
            positions = [s.stored + d for s, tree in zip(running, trees, strict=True) for d in tree.depths]
            places = [
                (s.slot, s.stored + i, s.stored, word)
                for s, tree in zip(running, trees, strict=True)
                for i, word in enumerate(tree.ancestors())
            ]
            ids, at = self._tensor(tokens), self._tensor(positions)
            return self._forward.rows(ids, at, self._tensor(places), tap=tap)
        most = max(sizes)
        padded = [_padded(tree, most) for tree in trees]
        ids = self._tensor([tree.tokens for tree in padded])
        lengths = [s.stored for s in running]
        at = self._tensor([[n + d for d in t.depths] for n, t in zip(lengths, padded, strict=True)])
        step = SlotStep.tree(self.cache, 0, lengths, self._tensor([t.ancestors() for t in padded]))
        states = self._forward(ids, at, step, tap=tap)
        real = self._tensor([b * most + i for b, size in enumerate(sizes) for i in range(size)])
        features = states.features
        return TargetStates(
            states.last.flatten(0, 1)[real],
            None if features is None else features.flatten(0, 1)[real],
        )

    def _draw(
        self, last: Tensor, sequences: Sequence[_Sequence], trees: Sequence[DraftTree | None]
    ) -> list[int]:
        """The target's own token at every node, from states [M, h]; None stands for a prompt's last token."""
        logits = self._forward.logits(last)  # [M, V]
        sizes = [1 if tree is None else len(tree.tokens) for tree in trees]
        if any(s.params.adjusts or s.params.filters for s in sequences):
            logits = logits.float()
            pieces = []
            for s, tree, part in zip(sequences, trees, logits.split(sizes), strict=True):
                shown = None if tree is None else [tree]
                pieces.append(process_logits(part[None], [s.params], [s.history], shown)[0])
            logits = torch.cat(pieces)
        if all(s.params.temperature == 0 for s in sequences):
            return first_argmax(logits).tolist()
        params = [s.params for s, size in zip(sequences, sizes, strict=True) for _ in range(size)]
        keys = SamplingTensors.of(params, last.device)
        positions = [
            s.stored + d - (tree is None)
            for s, tree in zip(sequences, trees, strict=True)
            for d in ((0,) if tree is None else tree.depths)
        ]
        at = self._tensor(positions)[:, None]
        root = torch.full_like(at, -1)  # every row as a tree of its own: the walk is ours
        drawn = accept_tree(logits[:, None], root, root, at, keys.temperature, keys.seed, keys.sample)
        return drawn.token.tolist()

    def _observe(
        self,
        running: Sequence[_Sequence],
        trees: Sequence[DraftTree],
        walks: Sequence[tuple[int, list[int], list[int]]],
        draft_s: float,
        verify_s: float,
    ) -> None:
        """Tell the planner what its plan came to; the times of batches in which some do not draft are of no
        use."""
        if self.planner is None or not all(s.drafts for s in running):
            return
        accepted = [min(len(path) - 1, len(tokens)) for _, path, tokens in walks]
        slots = [s.slot for s in running]
        self.planner.observe(slots, trees, accepted, draft_s, verify_s, self._drafting().passes)

    def _keep(self, moved: Sequence[tuple[int, int, list[int]]]) -> None:
        """Make accepted nodes part of the stable prefixes; those that lie there already are left alone."""
        moved = [(slot, stored, path) for slot, stored, path in moved if path[-1] != len(path) - 1]
        if not moved:
            return
        longest = max(len(path) for _, _, path in moved)
        paths = [path + [-1] * (longest - len(path)) for _, _, path in moved]
        counts = [len(path) for _, _, path in moved]
        slots, lengths = [slot for slot, _, _ in moved], [stored for _, stored, _ in moved]
        self.cache.keep(*map(self._tensor, (slots, lengths, paths, counts)))

    def _extend(
        self, kept: Sequence[tuple[_Sequence, int, list[int], list[int]]], states: TargetStates
    ) -> None:
        if not kept:
            return
        wanted = self._wanted(states)
        rows = [begin + node for _, begin, path, _ in kept for node in path]
        chosen = None if wanted is None else wanted[rows]
        self._drafting().extend([s.slot for s, _, _, _ in kept], chosen, [tokens for _, _, _, tokens in kept])

    def _emit(self, sequence: _Sequence, tokens: list[int]) -> list[Emission]:
        sequence.output += tokens
        if sequence.history is not None:
            sequence.history.extend(tokens)
        return [Emission(sequence.request.id, tokens, sequence.finish_reason, sequence.stats)]

    def _release_finished(self, sequences: Sequence[_Sequence]) -> None:
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self._release(sequence)

    def _release(self, sequence: _Sequence) -> None:
        """Take a sequence out; in a padded batch the last one closes the gap."""
        place = self._running.index(sequence)
        if self._forward.takes_rows:
            del self._running[place]
            return
        last = self._running.pop()
        if last is not sequence:
            self._move(last, sequence.slot)
            self._running[place] = last

    def _wanted(self, states: TargetStates) -> Tensor | None:
        """What the drafter wants of the target at each row, [M, w]."""
        kind = self._drafting().state
        if kind == "none":
            return None
        chosen = states.features if kind == "aux" else states.last
        assert chosen is not None, "the engine was made without feature layers"
        return chosen

    def _drafting(self) -> Drafter:
        assert self.drafter is not None
        return self.drafter

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.target.device)


def _walk(tree: DraftTree, drawn: Sequence[int]) -> tuple[list[int], int]:
    """The accepted path, the root first, and what the target drew behind it."""
    children = {
        (parent, token): node
        for node, (token, parent) in reversed(list(enumerate(zip(tree.tokens, tree.parents, strict=True))))
    }
    path = [0]
    while (node := children.get((path[-1], drawn[path[-1]]))) is not None:
        path.append(node)
    return path, drawn[path[-1]]


def _padded(tree: DraftTree, size: int) -> DraftTree:
    """With children of the root added up to ``size`` nodes, which nothing looks at."""
    more = size - len(tree.tokens)
    return DraftTree(tree.tokens + (0,) * more, tree.parents + (0,) * more, tree.depths + (1,) * more)


def _until_end(tokens: list[int], end_ids: frozenset[int]) -> list[int]:
    """The tokens up to the first that ends the output, that one included."""
    for i, token in enumerate(tokens):
        if token in end_ids:
            return tokens[: i + 1]
    return tokens
