"""The device loop where tensors are on a GPU that is simulated: captured, overlapped, and never waiting."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from stages.decoding import Engine, GenerationRequest, SamplingParams
from stages.decoding.drafters import Drafter, EagleDrafter, OracleDrafter
from stages.targets import Target, load_target
from tests.decoding.device.test_loop import (
    DYNAMIC,
    mixed_requests,
    on_the_device,
    on_the_host,
    outputs,
    steps,
)
from tests.decoding.test_engine import random_head, random_prompt
from tests.gpu.simulated import SimulatedGpu, simulated_gpu, to_gpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one: see tests/gpu")


@pytest.fixture(scope="module")
def gpu_target(tiny_path: str) -> Target:
    target = load_target(tiny_path, device="cpu", dtype="float32")
    return replace(target, model=to_gpu(target.model), device=torch.device("cuda"))


def never_waiting(gpu: SimulatedGpu, engine: Engine) -> list[int]:
    """Make whatever waits, from before a cycle is launched until its record is on its way, an error; the
    cycles are counted."""
    assert engine.device is not None
    launched, count = engine.device._launched, [0]

    def watched():
        count[0] += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launched()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.device._launched = watched
    return count


def run_on(
    target: Target,
    drafter: Callable[[], Drafter],
    tree: str,
    requests: list[GenerationRequest],
    **options: bool,
) -> tuple[dict[str, list], Engine, int, int]:
    """Outputs, the engine, cycles and graphs."""
    with simulated_gpu() as gpu, warnings.catch_warnings():
        warnings.simplefilter("error")  # what cannot be captured warns
        engine = on_the_device(target, drafter(), tree, slots=2, **options)
        cycles = never_waiting(gpu, engine)
        return outputs(engine, requests), engine, cycles[0], gpu.graphs


@pytest.mark.parametrize(
    ("tree", "overlap", "fused", "count"),
    [(DYNAMIC, True, False, 6), ("chain:depth=3", False, True, 4), ("cost", True, False, 1)],
)
def test_captured_cycles_of_a_head_never_wait_and_put_out_what_the_host_does(
    tiny_target, gpu_target, tree, overlap, fused, count
):
    requests = [
        replace(r, params=replace(r.params, max_new_tokens=min(14, r.params.max_new_tokens)))
        for r in mixed_requests(tiny_target, count)
    ]
    expected = outputs(on_the_host(tiny_target, None, "none", slots=4), requests, plain=True)
    head = random_head(tiny_target)

    def drafter() -> EagleDrafter:
        return EagleDrafter(to_gpu(copy.deepcopy(head)), slots=2)

    found, engine, cycles, graphs = run_on(gpu_target, drafter, tree, requests, overlap=overlap, fused=fused)
    assert found == expected
    assert all(run._captures for run in engine.device._runs)
    assert 0 < graphs < cycles


def test_where_the_cache_has_grown_cycles_are_captured_anew(tiny_target, gpu_target):
    source = random.Random(4)
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    requests = [
        GenerationRequest(str(n), random_prompt(source, tiny_target, size), params)
        for n, size in enumerate([20, 20, 150])
    ]
    plain = on_the_host(tiny_target, None, "none", slots=1)
    oracle, expected = OracleDrafter(0.7, tiny_target.vocab_size), {}
    for request in requests:
        longer = replace(request, params=replace(params, max_new_tokens=20))
        whole = [t for e in steps(plain, [longer]) for t in e.tokens]
        oracle.know(request.prompt_ids, whole)
        expected[request.id] = [*whole[:9], "length"]
    found, _, _, graphs = run_on(gpu_target, lambda: oracle, "chain:depth=3", requests)
    assert found == expected
    assert graphs > 2  # two sizes, and again


class TestTheSimulatedGpu:
    """It would tell."""

    def test_values_and_copies_make_the_host_wait(self):
        with simulated_gpu() as gpu:
            numbers = torch.arange(3, device="cuda")
            for wait in (
                lambda: numbers[0].item(),
                lambda: numbers.tolist(),
                lambda: bool(numbers.any()),
                lambda: numbers[numbers > 1],
                lambda: numbers.nonzero(),
                lambda: torch.equal(numbers, numbers),
                lambda: numbers.cpu(),
                lambda: torch.tensor([1], device="cuda"),
                lambda: torch.ones(2).to("cuda", non_blocking=True),
                lambda: numbers.repeat_interleave(numbers),
            ):
                before = len(gpu.waits)
                wait()
                assert len(gpu.waits) > before
                torch.cuda.set_sync_debug_mode("error")
                with pytest.raises(RuntimeError, match="synchronizing"):
                    wait()
                torch.cuda.set_sync_debug_mode("default")

    def test_tensors_of_two_devices_do_not_mix(self):
        with simulated_gpu(), pytest.raises(RuntimeError, match="same device"):
            torch.ones(3, device="cuda") + torch.ones(3)

    def test_a_queued_copy_arrives_when_it_is_waited_for(self):
        with simulated_gpu() as gpu:
            memory = torch.zeros(2, pin_memory=True)
            memory.copy_(torch.ones(2, device="cuda"), non_blocking=True)
            assert memory.tolist() == [0, 0]
            gpu.arrive()
            assert memory.tolist() == [1, 1]
            memory.to("cuda", non_blocking=True)
            memory += 1
            with pytest.raises(AssertionError, match="was changed before it was copied"):
                gpu.arrive()

    def test_a_graph_replays_on_the_tensors_that_it_saw(self):
        with simulated_gpu():
            x, factor = torch.ones(2, device="cuda"), 3
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = (x * factor).sum()
            factor = 5
            x += 1
            graph.replay()
            assert y.item() == 2 * 2 * 3
