"""What stands for ``torch.cuda`` and for the kernels on the simulated GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from kernels.accept import Acceptance, accept_states_torch, accept_tree_torch
from kernels.compact import compact_torch
from kernels.draft_topk import draft_topk_torch
from kernels.filters import Filters, filter_floor_torch
from kernels.noise import gumbel_noise_torch, gumbel_noise_vocab_torch
from kernels.tree_attention import tree_attention_torch

if TYPE_CHECKING:
    from tests.gpu.simulated import SimulatedGpu


def _attention(*args: Any, splits: int | None = None, tiling: Any = None, **options: Any) -> Tensor:
    return tree_attention_torch(*args, **options)


_KERNELS = {
    "tree_attention_triton.tree_attention_triton": _attention,
    "accept_triton.accept_tree_triton": accept_tree_torch,
    "accept_triton.accept_states_triton": accept_states_torch,
    "filters_triton.filter_floor_triton": filter_floor_torch,
    "draft_topk_triton.draft_topk_triton": draft_topk_torch,
    "compact_triton.compact_triton": compact_torch,
    "noise_triton.gumbel_noise_triton": gumbel_noise_torch,
    "noise_triton.gumbel_noise_vocab_triton": gumbel_noise_vocab_torch,
}
# Records of tensors, seen through where arguments and results are.
for record in (Filters, Acceptance):
    names = [field.name for field in dataclasses.fields(record)]
    register_pytree_node(
        record,
        lambda value, names=names: ([getattr(value, name) for name in names], None),
        lambda values, _, record=record: record(*values),
    )


class Event:
    def __init__(self, gpu: SimulatedGpu, **_: Any) -> None:
        self.gpu = gpu
        self.recorded = False

    def record(self, *_: Any) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded, "an event is waited for that nobody has recorded"
        self.gpu.arrive()

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Stream:
    def wait_stream(self, _: Stream) -> None:
        """There is one queue."""


class Generator:
    made = torch.Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls.made()


class Graph:
    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def replay(self) -> None:
        assert self.steps, "nothing was captured"
        for step in self.steps:
            step()


def replace_cuda(gpu: SimulatedGpu, patches: pytest.MonkeyPatch) -> None:
    """Until ``patches`` are undone, ``torch.cuda`` and the kernels' launchers are a simulated GPU's."""

    @contextlib.contextmanager
    def graph(captured: Graph, pool: Any = None) -> Iterator[None]:
        assert gpu.capturing is None
        gpu.capturing = captured
        try:
            yield
        finally:
            gpu.capturing = None
        gpu.graphs += 1

    def debug_mode(mode: str) -> None:
        gpu.strict = mode == "error"

    properties = SimpleNamespace(multi_processor_count=4, total_memory=1 << 34)
    replaced = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "Event": partial(Event, gpu),
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": lambda: (0, 0),
        "Stream": Stream,
        "current_stream": lambda *_: Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda *_: gpu.arrive(),
        "_sleep": lambda _: None,
        "empty_cache": lambda: None,
        "set_sync_debug_mode": debug_mode,
        "get_device_name": lambda *_: "a simulated GPU",
        "get_device_properties": lambda *_: properties,
        "max_memory_allocated": lambda *_: 0,
        "mem_get_info": lambda *_: (1 << 34, 1 << 34),
    }
    patches.setattr(torch, "Generator", Generator)
    for name, value in replaced.items():
        patches.setattr(torch.cuda, name, value)

    for name, reference in _KERNELS.items():
        module, function = name.split(".")
        where = importlib.import_module(f"kernels.{module}")
        patches.setattr(where, function, partial(gpu.launch, reference))
