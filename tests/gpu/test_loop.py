"""The device loop on the GPU at hand: captured, overlapped, and never waiting."""

from __future__ import annotations

import pytest
import torch

from stages.decoding.drafters import EagleDrafter
from stages.targets import Target, load_target
from tests.decoding.device.test_loop import DYNAMIC, mixed_requests, on_the_device, on_the_host, outputs
from tests.decoding.test_engine import random_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.fixture(scope="module")
def target(tiny_path: str) -> Target:
    return load_target(tiny_path, device="cuda", dtype="float32")


def test_both_loops_put_out_what_the_host_does_from_captured_cycles(target):
    requests, head = mixed_requests(target, 12), random_head(target).cuda()
    host = on_the_host(target, None, "none", slots=4)
    host.device = None
    expected = outputs(host, requests, plain=True)
    for overlap in (True, False):
        drafter = EagleDrafter(head, slots=4)
        engine = on_the_device(target, drafter, DYNAMIC, slots=4, overlap=overlap)
        assert outputs(engine, requests) == expected
        run = engine.device._runs[0]
        assert run._captures
        assert run._graphs


@torch.inference_mode()
def test_a_cycle_never_waits_for_the_gpu(target):
    engine = on_the_device(target, EagleDrafter(random_head(target).cuda(), slots=2), DYNAMIC, slots=2)
    outputs(engine, mixed_requests(target, 3))  # compiles the kernels
    cycle, slots = engine.device._runs[0].cycle, torch.arange(2, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        cycle.run(slots, filtered=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
