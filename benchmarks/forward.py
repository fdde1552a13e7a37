"""What a forward of the target over a few tokens costs on this CPU: by modules, by the CPU ops, and at least.

    python benchmarks/forward.py --target builtin:smollm2

All ways take turns at every row count, several rounds over, and the fastest of each counts: others on
the machine only ever add. The floor is the bytes of the weights that a forward reads over the bandwidth that
this machine reads a large tensor with, in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from stages.targets import SlotCache, SlotForward, SlotStep, Target, load_target
from stages.targets.taps import layer_stack

READ_BYTES = 1 << 29


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="builtin:smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--context", type=int, default=200, help="tokens before these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(options.target, "cpu", options.dtype)
    # Taken before the ops take the linear layers of families that run module by module.
    by_module = partial(_modules, target, _cache(target, options.context))
    ops = partial(_ops, SlotForward(target, _cache(target, options.context), layers=None))
    large = torch.ones(READ_BYTES // 4)
    ways: dict[str, Callable[[], object]] = {"read": large.sum}
    for rows in options.rows:
        ways[f"modules {rows}"] = partial(by_module, rows, options.context)
        ways[f"ops {rows}"] = partial(ops, rows, options.context)
    fastest = {name: float("inf") for name in ways}
    with torch.inference_mode():
        for _ in range(options.rounds + 1):  # the first warms up, and only ever adds
            for name, run in ways.items():
                start = time.perf_counter()
                run()
                fastest[name] = min(fastest[name], time.perf_counter() - start)
    bandwidth = READ_BYTES / fastest["read"]
    weights = sum(
        p.nbytes
        for p in {id(p): p for layer in layer_stack(target.decoder) for p in layer.parameters()}.values()
    )
    weights += target.model.get_output_embeddings().weight.nbytes
    floor = weights / bandwidth
    print(f"{weights / 1e6:.0f} MB of weights at {bandwidth / 1e9:.1f} GB/s: {floor * 1e3:.1f} ms\n")
    print("rows   modules ms      ops ms   ops / floor")
    for rows in options.rows:
        modules, by_ops = fastest[f"modules {rows}"], fastest[f"ops {rows}"]
        print(f"{rows:4} {modules * 1e3:12.1f} {by_ops * 1e3:11.1f} {by_ops / floor:13.2f}")


def _cache(target: Target, context: int) -> SlotCache:
    shape = {"slots": 1, "rows": context + 64}
    return SlotCache.for_model(target.config, **shape, dtype=target.dtype, device=target.device)


def _modules(target: Target, cache: SlotCache, rows: int, context: int) -> None:
    """The forward that decoding makes without CPU ops."""
    step = SlotStep.causal(cache, 0, [context], rows)
    positions = torch.arange(context, context + rows)[None]
    tokens = torch.zeros_like(positions)
    out = target.decoder(
        input_ids=tokens, position_ids=positions, attention_mask=step.mask, use_cache=False, slots=step
    )
    target.logits(out.last_hidden_state)


def _ops(forward: SlotForward, rows: int, context: int) -> None:
    step = SlotStep.causal(forward.cache, 0, [context], rows)
    positions = torch.arange(context, context + rows)
    states = forward.rows(torch.zeros_like(positions), positions, step.places)
    forward.logits(states.last)


if __name__ == "__main__":
    main()
