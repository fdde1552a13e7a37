"""Plain decoding of many prompts at once: continuous batching over KV slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from kernels import accept_tree
from stages.decoding.decoder import PREFILL_CHUNK, FinishReason
from stages.decoding.sampling import SamplingParams, SamplingTensors, TokenHistory, process_logits
from stages.errors import EagleError
from stages.targets import SlotCache, SlotForward, SlotStep, Target

PREFILL_TOKENS = 1024


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt to answer; ``id`` is the caller's."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class GenerationResult:
    """The ids sampled for a request, the one that ended it included."""

    id: str
    token_ids: list[int]
    finish_reason: FinishReason


@dataclass
class _Running:
    request: GenerationRequest
    cap: int
    end_ids: frozenset[int]
    output: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        adjusts = self.request.params.adjusts
        self.history = TokenHistory(self.request.prompt_ids) if adjusts else None

    def add(self, token: int) -> None:
        self.output.append(token)
        if self.history is not None:
            self.history.extend([token])

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.output and self.output[-1] in self.end_ids:
            return "stop"
        return "length" if len(self.output) >= self.cap else None

    @property
    def position(self) -> int:
        """Of the last token, which the next step feeds."""
        return len(self.request.prompt_ids) + len(self.output) - 1


def generate_batch(
    target: Target, requests: Sequence[GenerationRequest], max_batch: int = 32
) -> Iterator[GenerationResult]:
    """Answer the requests, yielding each as it finishes.

    Slots 0 .. n-1 hold the running sequences, so every forward reads one run of slots; when a sequence ends,
    a waiting one takes its place, or the last one moves into it. Long prompts start first, which keeps those
    that run together alike.

    Raises:
        EagleError: a prompt is empty or leaves no room in the target's context.
    """
    for request in requests:
        if not 0 < len(request.prompt_ids) < target.max_length:
            raise EagleError(
                f"prompt {request.id} has {len(request.prompt_ids)} tokens; the target takes 1 to "
                f"{target.max_length - 1}"
            )
    waiting = deque(sorted(requests, key=lambda r: (-len(r.prompt_ids), r.id)))
    if not waiting:
        return
    cache = SlotCache.for_model(
        target.config, slots=min(max_batch, len(waiting)), rows=1, dtype=target.dtype, device=target.device
    )
    forward = SlotForward(target, cache, layers=None)
    running: list[_Running] = []
    slots = cache.slots
    while waiting or running:
        # Starting a few at a time keeps prefill forwards wide; a quarter of the slots may idle for it.
        free = slots - len(running)
        if waiting and (free >= max(1, slots // 4) or free >= len(waiting) or not running):
            running.extend(_start(target, forward, waiting, len(running), free))
        else:
            _step(target, forward, running)
        yield from _finish(cache, running)


def _start(
    target: Target, forward: SlotForward, waiting: deque[GenerationRequest], first: int, free: int
) -> list[_Running]:
    """Prefill waiting requests of like length into slots from ``first`` on, and choose their first tokens."""
    group = [waiting.popleft()]
    longest = len(group[0].prompt_ids)
    while waiting and len(group) < free and longest * (len(group) + 1) <= PREFILL_TOKENS:
        group.append(waiting.popleft())
    # Rows behind a short prompt hold padding until its own tokens overwrite them; causality hides them.
    ids = [r.prompt_ids + [0] * (longest - len(r.prompt_ids)) for r in group]
    tokens = torch.tensor(ids, device=target.device)
    ends = torch.tensor([len(r.prompt_ids) - 1 for r in group], device=target.device)
    last = torch.empty(len(group), 1, target.hidden_size, dtype=target.dtype, device=target.device)
    forward.cache.reserve(longest)
    for begin in range(0, longest, PREFILL_CHUNK):
        chunk = tokens[:, begin : begin + PREFILL_CHUNK]
        step = SlotStep.causal(forward.cache, first, [begin] * len(group), chunk.shape[1])
        positions = torch.arange(begin, begin + chunk.shape[1], device=target.device).expand_as(chunk)
        states = forward(chunk, positions, step)
        here = ((ends >= begin) & (ends < begin + chunk.shape[1])).nonzero()[:, 0]
        last[here, 0] = states.last[here, ends[here] - begin]
    started = [
        _Running(
            request,
            cap=min(request.params.max_new_tokens, target.max_length - len(request.prompt_ids)),
            end_ids=request.params.end_ids(target.eos_ids),
        )
        for request in group
    ]
    _choose(target, forward, last, ends[:, None], started)
    return started


def _step(target: Target, forward: SlotForward, running: list[_Running]) -> None:
    """One token more for every running sequence."""
    tokens = torch.tensor([[r.output[-1]] for r in running], device=target.device)
    lengths = [r.position for r in running]
    forward.cache.reserve(max(lengths) + 1)
    positions = torch.tensor(lengths, device=target.device)[:, None]
    states = forward(tokens, positions, SlotStep.causal(forward.cache, 0, lengths, 1))
    _choose(target, forward, states.last, positions, running)


@torch.inference_mode()
def _choose(
    target: Target,
    forward: SlotForward,
    last: torch.Tensor,
    positions: torch.Tensor,
    running: list[_Running],
) -> None:
    """Draw each sequence's next token from its state in last [B, 1, h]; positions [B, 1] are those of the
    states."""
    params = [r.request.params for r in running]
    keys = SamplingTensors.of(params, target.device)
    logits = process_logits(forward.logits(last), params, [r.history for r in running])
    root = torch.full_like(positions, -1)
    drawn = accept_tree(logits, root, root, positions, keys.temperature, keys.seed, keys.sample).token
    for sequence, token in zip(running, drawn.tolist(), strict=True):
        sequence.add(token)


def _finish(cache: SlotCache, running: list[_Running]) -> Iterator[GenerationResult]:
    """Take out the sequences that ended, closing each gap with the last one."""
    for slot in reversed(range(len(running))):
        sequence = running[slot]
        reason = sequence.finish_reason
        if reason is None:
            continue
        last = running.pop()
        if last is not sequence:
            cache.move(len(running), slot, last.position)
            running[slot] = last
        yield GenerationResult(sequence.request.id, sequence.output, reason)
