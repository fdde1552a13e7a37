"""The engine's own cycle with a draft head: no wait for the GPU, the same tokens in every loop, its time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu import CUDA, DEVICE
from benchmarks.gpu.engine import LOOPS, engine_of, project_missing, random_target
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.size import Size
from benchmarks.gpu.times import seconds

if TYPE_CHECKING:
    from stages.decoding import Engine

_TREES = ("chain:depth=4", "dynamic:depth=5,width=4,nodes=15,min_prob=0,expand_prob=0")
_TOKENS = 24


def run_loop(report: Report, size: Size) -> None:
    """An EAGLE-3 head of random weights drafts; its tokens are hardly ever right, which leaves the work the
    same."""
    if project_missing(report):
        return
    from stages.decoding import GenerationRequest, SamplingParams
    from stages.decoding.drafters import EagleDrafter
    from stages.heads import Eagle3Config, Eagle3Head

    target = random_target(size)
    layers = target.feature_layers if size.model.layers >= 7 else (1, 1, 1)
    torch.manual_seed(1)
    with DEVICE:
        head = Eagle3Head(Eagle3Config.from_target(target.config, size.model.draft_vocab)).to(size.dtype)
    head = head.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(6)
    for batch in size.engine_batches:
        prompts = torch.randint(size.model.vocab, (batch, size.prompt), generator=generator).tolist()
        requests = [
            GenerationRequest(
                str(i), prompt, SamplingParams(_TOKENS, temperature=0.8 * (i % 2), top_p=0.9, ignore_eos=True)
            )
            for i, prompt in enumerate(prompts)
        ]

        def answers(engine: Engine, requests: list[GenerationRequest] = requests) -> list[list[int]]:
            outputs: dict[str, list[int]] = {request.id: [] for request in requests}
            for request in requests:
                engine.submit(request)
            while engine.busy:
                for emission in engine.step():
                    outputs[emission.id] += emission.tokens
            return list(outputs.values())

        for tree in _TREES:
            name = f"loop: {tree.partition(':')[0]}, batch {batch}"
            with report.attempt(name):
                engines = {
                    loop: engine_of(target, loop, batch, EagleDrafter(head, slots=batch), tree, layers)
                    for loop in LOOPS
                }
                found = {loop: answers(engine) for loop, engine in engines.items()}
                # In half precision near-ties may fall otherwise where batches grow and shrink at other times.
                if size.dtype == torch.float32 or batch == 1:
                    same = found["device"] == found["overlapped"]
                    report.check(f"{name}: overlapped as not", same, f"{batch * _TOKENS} tokens")
                if size.dtype == torch.float32:
                    same = found["host"] == found["device"]
                    report.check(f"{name}: as on the host", same, "equal in float32")
                if CUDA:
                    report.loops.append(_timed(report, engines["device"], name, batch, tree, size))


@torch.inference_mode()
def _timed(report: Report, engine: Engine, name: str, batch: int, tree: str, size: Size) -> Row:
    """One cycle, launched step by step without a wait and replayed as a graph; over sequences that have
    ended, whose rows cost what others cost."""
    assert engine.device is not None
    run = engine.device._runs[0]
    report.check(f"{name}: captured", bool(run._graphs), f"{len(run._graphs)} graphs")
    slots = torch.arange(batch, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    begin = time.perf_counter()
    try:
        run.cycle.run(slots, filtered=True)
        waited = ""
    except RuntimeError as error:
        waited = str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    launching = time.perf_counter() - begin
    report.check(f"{name}: never waits for the GPU", not waited, waited or "no synchronisation")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run(list(range(batch)), filtered=True)
    replaying = time.perf_counter() - begin
    row: Row = {"tree": tree.partition(":")[0], "batch": batch, "launching us": launching * 1e6}
    for fused in (False, True):
        run.cycle._fused = fused
        took = seconds(lambda: run.cycle.run(slots, filtered=False), size.repeats)
        row["graph us" if not fused else "graph us, LM head fused"] = took * 1e6
    run.cycle._fused = False
    return row | {"replaying us": replaying * 1e6}
