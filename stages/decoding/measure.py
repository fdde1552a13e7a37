"""What a target's forward and a drafter's pass cost on this machine, measured in a second or two."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch

from kernels import first_argmax
from kernels.cpu import Drawing
from stages.decoding.costs import Costs
from stages.decoding.drafters import Drafter
from stages.decoding.sampling import SamplingParams
from stages.decoding.tree import TreePlan
from stages.targets import SlotForward, SlotStep, Target

VERIFY_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 16, 17, 18, 21, 22, 25, 28, 29, 32)
"""The CPU ops take rows by sevens, or by sixteens, and the first of another part costs most."""

MORE_ROWS = (64, 128, 256)
"""Of batches whose trees have as many: a line through the sizes above misses the steps that follow."""

DRAFT_ROWS = (1, 2, 4, 8, 16, 32)

_TREE_ROWS = 16
_PREFIX = 64
_REPEATS = 4
_LONGEST_S = 2.0


def measure_costs(target: Target, forward: SlotForward, drafter: Drafter) -> Costs:
    """Seconds of a forward over a chain, tokens chosen, and of one more pass of the drafter, by rows.

    Slot 0 of both is used, so nothing may run. Sizes that take too long are left out: their costs lie on the
    line through the others.
    """
    most = forward.cache.slots * _TREE_ROWS
    sizes = [*VERIFY_ROWS, *(rows for rows in MORE_ROWS if rows <= most)]
    forward.cache.reserve(_PREFIX + max(sizes))
    verify = _fastest({rows: partial(_verify, target, forward, drafter, rows) for rows in sizes})
    propose = _proposals(target, drafter)
    levels = {(rows, depth): partial(propose, rows, depth) for rows in DRAFT_ROWS for depth in (1, 2)}
    propose(1, 2)
    if not drafter.passes:  # it drafts without a model of its own
        return Costs(verify, {1: 0.0})
    seconds = _fastest(levels)
    # The difference of two noisy numbers; no pass is free.
    draft = {
        rows: max(seconds[rows, 2] - seconds[rows, 1], 0.1 * seconds[rows, 1])
        for rows, depth in seconds
        if depth == 2
    }
    return Costs(verify, draft)


def _verify(target: Target, forward: SlotForward, drafter: Drafter, rows: int) -> None:
    tokens = torch.zeros(1, rows, dtype=torch.int64, device=target.device)
    positions = torch.arange(_PREFIX, _PREFIX + rows, device=target.device)[None]
    step = SlotStep.causal(forward.cache, 0, [_PREFIX], rows)
    states = forward(tokens, positions, step, tap=drafter.state == "aux")
    if forward.draws:
        forward.draw(states.last[0], Drawing(), [])
    else:
        first_argmax(forward.logits(states.last)[0]).tolist()


def _proposals(target: Target, drafter: Drafter) -> Callable[[int, int], None]:
    """Drafts behind one verified token so many levels, all but the first by a pass over so many rows."""
    prompt = [i % target.vocab_size for i in range(_PREFIX)]
    sizes = {"none": 0, "last": target.hidden_size, "aux": 3 * target.hidden_size}
    states = torch.zeros(len(prompt) - 1, sizes[drafter.state], dtype=target.dtype, device=target.device)
    drafter.start(0, prompt, SamplingParams())
    drafter.extend([0], None if drafter.state == "none" else states, [prompt[1:]])

    def propose(width: int, depth: int) -> None:
        # Begun anew, so that nothing is learned.
        drafter.start(0, prompt, SamplingParams(), known=_PREFIX - 2)
        drafter.extend([0], None if drafter.state == "none" else states[-1:], [prompt[-1:]])
        drafter.propose([0], [TreePlan("dynamic", depth=depth, width=width, nodes=width)])

    return propose


_Key = TypeVar("_Key")


def _fastest(runs: Mapping[_Key, Callable[[], None]]) -> dict[_Key, float]:
    """Seconds of each at its fastest. They take turns, so that what else the machine does meets all alike."""
    found: dict[_Key, float] = {}
    with torch.inference_mode():
        for key, run in runs.items():
            run()  # what is made once
            found[key] = _timed(run)
            if found[key] * _REPEATS > _LONGEST_S and len(found) > 1:
                break
        begin = time.perf_counter()
        for _ in range(_REPEATS):
            if time.perf_counter() - begin > _LONGEST_S:
                break
            for key in found:
                found[key] = min(found[key], _timed(runs[key]))
    return found


def _timed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
