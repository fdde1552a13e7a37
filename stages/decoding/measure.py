"""What a target's forward and a drafter's pass cost on this machine, measured in a second or two."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from stages.decoding.cost import Costs
from stages.decoding.drafters import Drafter
from stages.decoding.sampling import SamplingParams
from stages.decoding.tree import TreePlan
from stages.targets import SlotForward, SlotStep, Target

VERIFY_ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
DRAFT_ROWS = (1, 2, 4, 8)

_PREFIX = 64
_REPEATS = 4
_LONGEST_S = 2.0


def measure_costs(target: Target, forward: SlotForward, drafter: Drafter) -> Costs:
    """Seconds of a forward over a tree, tokens chosen, and of one more pass of the drafter, by rows.

    Slot 0 of both is used, so nothing may run. Sizes that take too long are left out: their costs lie on the
    line through the others.
    """
    forward.cache.reserve(_PREFIX + max(VERIFY_ROWS))
    verify: dict[int, float] = {}
    for rows in VERIFY_ROWS:
        verify[rows] = _fastest(partial(_verify, target, forward, drafter, rows))
        if verify[rows] * _REPEATS > _LONGEST_S:
            break
    draft: dict[int, float] = {}
    for rows in DRAFT_ROWS:
        once, twice = (_fastest(_proposal(target, drafter, rows, depth)) for depth in (1, 2))
        draft[rows] = max(twice - once, 0.0)
        if not drafter.passes:  # it drafts without a model of its own
            return Costs(verify, {1: 0.0})
    return Costs(verify, draft)


def _verify(target: Target, forward: SlotForward, drafter: Drafter, rows: int) -> None:
    tokens = torch.zeros(1, rows, dtype=torch.int64, device=target.device)
    positions = torch.arange(_PREFIX, _PREFIX + rows, device=target.device)[None]
    step = SlotStep.causal(forward.cache, 0, [_PREFIX], rows)
    states = forward(tokens, positions, step, tap=drafter.state == "aux")
    forward.logits(states.last).argmax(-1).tolist()


def _proposal(target: Target, drafter: Drafter, width: int, depth: int) -> Callable[[], None]:
    """Drafts ``depth`` levels, all but the first by a pass over ``width`` rows."""
    plan = TreePlan("dynamic", depth=depth, width=width, nodes=2 * width)
    prompt = [i % target.vocab_size for i in range(_PREFIX)]
    sizes = {"none": 0, "last": target.hidden_size, "aux": 3 * target.hidden_size}
    states = torch.zeros(len(prompt) - 1, sizes[drafter.state], dtype=target.dtype, device=target.device)
    drafter.start(0, prompt, SamplingParams())
    drafter.extend([0], None if drafter.state == "none" else states, [prompt[1:]])

    def propose() -> None:
        drafter.propose([0], [plan])

    propose()  # what was verified is run in the first one
    return propose


def _fastest(run: Callable[[], None]) -> float:
    with torch.inference_mode():
        run()
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
            if sum(times) > _LONGEST_S:
                break
    return min(times)
