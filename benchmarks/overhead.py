"""What a decoding cycle takes besides the ops of the target and the draft head, on a CPU.

    python -m benchmarks.overhead --head runs/larger/head

Decodes a few prompts one at a time, plainly and drafting in turns, and takes the time of every cycle and of
the ops that are the forwards: layers and LM head of the target, the drafting cycle of the head. What is left
is the engine's: plans, rows, walks, moved rows, what is learned, and Python. Means over cycles; a
busy machine adds to both.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.cpu import load_ops
from stages.artifacts import open_artifact
from stages.decoding import EagleModel, SamplingParams, TreeConfig
from stages.decoding.engine import Engine
from stages.heads import load_head
from stages.prompts import read_prompts
from stages.targets import load_target

OPS = {
    "target": ("decode", "layers", "linear", "linear_argmax", "linear_draw"),
    "head": ("draft", "head_fuse", "head_pass", "head_logits"),
}


class Watch:
    """Seconds of the cycles, and of the ops within them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cycles = 0
        self._within = False
        cycle = Engine._cycle

        def watched(engine: Engine, running: Any) -> Any:
            self._within = True
            began = time.perf_counter()
            found = cycle(engine, running)
            self.seconds["cycle"] += time.perf_counter() - began
            self.cycles += 1
            self._within = False
            return found

        Engine._cycle = watched  # type: ignore[assignment, method-assign]
        for part, names in OPS.items():
            for name in names:
                op = getattr(torch.ops.eagle_cpu, name)
                setattr(torch.ops.eagle_cpu, name, partial(self._timed, part, op))

    def _timed(self, part: str, op: Callable[..., Any], *args: Any) -> Any:
        began = time.perf_counter()
        found = op(*args)
        if self._within:
            self.seconds[part] += time.perf_counter() - began
        return found

    def reset(self) -> None:
        self.seconds.clear()
        self.cycles = 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="builtin:smollm2")
    parser.add_argument("--head", required=True)
    parser.add_argument("--tree", default="cost")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if (reason := load_ops()) is not None:
        parser.error(f"there are no CPU ops to compare with: {reason}")
    target = load_target(options.target, "cpu", "bfloat16")
    head = load_head(open_artifact(options.head, "head"), dtype=target.dtype, device=target.device)
    model = EagleModel(target, head, TreeConfig.parse(options.tree))
    prompts = [prompt.turns[0] for prompt in read_prompts("builtin:eval", options.num_prompts)]
    watch = Watch()
    print(f"{'':>16}{'cycle, ms':>12}{'target':>9}{'head':>9}{'left':>9}{'share':>9}{'tokens':>9}")
    for temperature in options.temperature:
        params = SamplingParams(options.max_new_tokens, temperature, seed=0)
        totals: dict[bool, list[float]] = {speculative: [0.0] * 5 for speculative in (False, True)}
        for turn in range(options.rounds + 1):
            for prompt in prompts:
                for speculative, total in totals.items():
                    watch.reset()
                    stats = model.generate(prompt, params, speculative=speculative).stats
                    if turn:  # the first warms up
                        parts = [watch.seconds[name] for name in ("cycle", "target", "head")]
                        for i, value in enumerate([*parts, watch.cycles, stats.tokens]):
                            total[i] += value
        for speculative, (cycle, forward, draft, cycles, tokens) in totals.items():
            name = f"T {temperature:g}, {'drafting' if speculative else 'plain'}"
            left = cycle - forward - draft
            ms = [1e3 * part / cycles for part in (cycle, forward, draft, left)]
            shown = "".join(f"{part:>9.2f}" for part in ms[1:])
            print(f"{name:>16}{ms[0]:>12.2f}{shown}{left / cycle:>9.1%}{tokens / cycles:>9.2f}")


if __name__ == "__main__":
    main()
