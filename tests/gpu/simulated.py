"""A GPU that is none: tensors that say they are on CUDA and hold CPU memory, and what CUDA does to programs.

Within `SimulatedGpu`
- an operation on tensors of two devices fails, as does reading a tensor's value, or any copy that would make
  the host wait, while syncs are forbidden (`torch.cuda.set_sync_debug_mode("error")`) or a graph is captured;
- a copy to pinned memory arrives when the host waits for the queue, and not before; pinned memory that is
  copied from must not change until then;
- a graph replays what was captured on the tensors it was captured with: whatever the host has put in as a
  number, or moved elsewhere since, is as it was.

Kernels are their references. Only what this project asks of CUDA is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from kernels.accept import Acceptance, accept_states_torch, accept_tree_torch
from kernels.compact import compact_torch
from kernels.draft_topk import draft_topk_torch
from kernels.filters import Filters, filter_floor_torch
from kernels.noise import gumbel_noise_torch, gumbel_noise_vocab_torch
from kernels.tree_attention import tree_attention_torch

aten = torch.ops.aten

# They ask for a value, or for a size that is one.
_WAITING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.is_nonzero,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
    aten.repeat_interleave,
}

# Methods whose Python binding looks for the device.
_BINDINGS = {
    Tensor.contiguous: aten.contiguous,
    Tensor.copy_: aten.copy_,
    Tensor.__invert__: aten.bitwise_not,
    Tensor.nonzero: aten.nonzero,
    Tensor.__float__: lambda tensor: float(tensor.item()),
    Tensor.__int__: lambda tensor: int(tensor.item()),
    Tensor.__index__: lambda tensor: int(tensor.item()),
    Tensor.__bool__: lambda tensor: bool(tensor.item()),
    Tensor.new_tensor: lambda like, data: torch.tensor(data, dtype=like.dtype, device=like.device),
}


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

# Not taken apart into what they are made of.
_WHOLE = {
    aten.to,
    aten._to_copy,
    aten.pin_memory,
    aten.is_pinned,
    aten.scaled_dot_product_attention,
    aten.equal,
}


class GpuTensor(Tensor):
    """``held`` is the CPU tensor with its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> GpuTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="cuda:0",
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        # A CPU build of torch cannot index tensors that are elsewhere, nor say where they lie.
        if function is Tensor.__getitem__:
            return _index(*args)
        if function is Tensor.__setitem__:
            return _index(*args)
        if function in _BINDINGS:
            return _BINDINGS[function](*args, **(kwargs or {}))
        if function is Tensor.data_ptr:
            return args[0].held.data_ptr()
        if function is Tensor.tolist:
            SimulatedGpu.current().wait("tolist")
            return args[0].held.tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        gpu = SimulatedGpu.active
        assert gpu is not None, "a tensor of the simulated GPU is used where there is none"
        return gpu.run(function, args, kwargs or {})


def _held(value: Any) -> Any:
    return value.held if isinstance(value, GpuTensor) else value


def _index(tensor: Tensor, index: Any, *value: Any) -> Any:
    """``tensor[index]``, or ``tensor[index] = value``."""
    gpu = SimulatedGpu.active
    assert gpu is not None
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
            gpu.wait("an index by a mask")
        if isinstance(part, Tensor) and not isinstance(part, GpuTensor):
            gpu.wait("an index that lies on the CPU")
        if isinstance(part, list):
            gpu.wait("an index that is a list")
    for one in value:
        if isinstance(one, Tensor) and not isinstance(one, GpuTensor) and one.dim():
            gpu.wait("numbers of the CPU written by index")
    where = tree_map(_held, index)
    if value:
        return gpu.do(lambda: _held(tensor).__setitem__(where, _held(value[0])), None)
    return gpu.do(lambda: _held(tensor)[where], (tensor,))


class _Event:
    def __init__(self, **_: Any) -> None:
        self.recorded = False

    def record(self, *_: Any) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded, "an event is waited for that nobody has recorded"
        SimulatedGpu.current().arrive()

    def elapsed_time(self, _: _Event) -> float:
        return 1.0


class _Stream:
    def wait_stream(self, _: _Stream) -> None:
        """There is one queue."""


class _Generator:
    made = torch.Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls.made()


class _Graph:
    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def replay(self) -> None:
        assert self.steps, "nothing was captured"
        for step in self.steps:
            step()


class SimulatedGpu(TorchDispatchMode):
    """Sees every operation; enter ``simulated_gpu()``.

    waits: what the host has waited for; graphs: how many were captured.
    """

    active: SimulatedGpu | None = None

    def __init__(self) -> None:
        super().__init__()
        self.strict = False
        self.waits: list[str] = []
        self.graphs = 0
        self._capture: _Graph | None = None
        self._pinned: dict[int, Tensor] = {}
        self._arriving: list[tuple[Tensor, Tensor]] = []  # pinned memory, and what will be in it
        self._leaving: list[tuple[Tensor, Tensor]] = []  # pinned memory, and what must still be in it

    @classmethod
    def current(cls) -> SimulatedGpu:
        assert cls.active is not None
        return cls.active

    def replace_cuda(self, patches: pytest.MonkeyPatch) -> None:
        @contextlib.contextmanager
        def graph(captured: _Graph, pool: Any = None) -> Iterator[None]:
            assert self._capture is None
            self._capture = captured
            try:
                yield
            finally:
                self._capture = None
            self.graphs += 1

        def debug_mode(mode: str) -> None:
            self.strict = mode == "error"

        properties = SimpleNamespace(multi_processor_count=4, total_memory=1 << 34)
        replaced = {
            "is_available": lambda: True,
            "_lazy_init": lambda: None,
            "Event": _Event,
            "CUDAGraph": _Graph,
            "graph": graph,
            "graph_pool_handle": lambda: (0, 0),
            "Stream": _Stream,
            "current_stream": lambda *_: _Stream(),
            "stream": lambda _: contextlib.nullcontext(),
            "synchronize": lambda *_: self.arrive(),
            "empty_cache": lambda: None,
            "set_sync_debug_mode": debug_mode,
            "get_device_name": lambda *_: "a simulated GPU",
            "get_device_properties": lambda *_: properties,
            "max_memory_allocated": lambda *_: 0,
            "mem_get_info": lambda *_: (1 << 34, 1 << 34),
        }
        patches.setattr(torch, "Generator", _Generator)
        for name, value in replaced.items():
            patches.setattr(torch.cuda, name, value)

        for name, reference in _KERNELS.items():
            module, function = name.split(".")
            where = importlib.import_module(f"kernels.{module}")
            patches.setattr(where, function, partial(self.launch, reference))

    def launch(self, reference: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A kernel: its reference, whatever that asks of tensors. What it returns is made anew."""
        for arg in tree_leaves((args, kwargs)):
            elsewhere = isinstance(arg, Tensor) and not isinstance(arg, GpuTensor)
            assert not elsewhere, f"an argument of {reference} lies on the CPU"
        given, named = tree_map(_held, args), tree_map(_held, kwargs)

        def step() -> Any:
            with _disable_current_modes():
                return reference(*given, **named)

        return self.do(step, ())

    # ---- the queue ----

    def wait(self, why: str) -> None:
        """The host waits for the queue."""
        if self.strict or self._capture is not None:
            raise RuntimeError(f"called a synchronizing CUDA operation: {why}")
        self.waits.append(why)
        self.arrive()

    def arrive(self) -> None:
        """All that was queued is done."""
        assert self._capture is None, "the host waits while a graph is captured"
        with _disable_current_modes():
            for memory, content in self._leaving:
                assert torch.equal(memory, content), "pinned memory was changed before it was copied"
            for memory, content in self._arriving:
                memory.copy_(content)
        self._leaving.clear()
        self._arriving.clear()

    def do(self, step: Callable[[], Any], views: tuple[Any, ...] | None) -> Any:
        """Run a step, and put it in the graph that is being captured.

        Args:
            views: the tensors that a result may be a view of; None where there is no result.
        """
        found = step()
        if self._capture is not None:
            known = {_held(t).untyped_storage().data_ptr() for t in views or ()}
            fresh = [
                (i, t)
                for i, t in enumerate(tree_leaves(found))
                if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known
            ]

            def again() -> None:
                results = tree_leaves(step())
                for i, tensor in fresh:
                    tensor.copy_(results[i])

            self._capture.steps.append(again if views is not None else step)
        if views is None:
            return found
        return tree_map(lambda t: GpuTensor(t) if isinstance(t, Tensor) else t, found)

    # ---- operations ----

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.run(function, args, kwargs or {})

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_gpu = [t for t in tensors if isinstance(t, GpuTensor)]
        others = [t for t in tensors if not isinstance(t, GpuTensor) and t.dim()]
        named = dict(zip([a.name for a in function._schema.arguments], args, strict=False)) | kwargs
        device = named.get("device")
        if device is not None:
            named["device"] = torch.device("cpu")
        if function._can_decompose() and function.overloadpacket not in _WHOLE:
            with self:  # what it is made of is seen too
                return function.decompose(*args, **kwargs)
        if function.overloadpacket is aten.copy_:
            return self._copy(args[0], args[1], bool(named.get("non_blocking", False)))
        if function.overloadpacket is aten._to_copy or function.overloadpacket is aten.to:
            like = named.get("other", args[0])
            there = isinstance(like, GpuTensor) if device is None else torch.device(device).type == "cuda"
            return self._to_copy(function, named, there)
        if function.overloadpacket is aten._pin_memory or function.overloadpacket is aten.pin_memory:
            assert self._capture is None, "memory is pinned while a graph is captured"
            return self._pin(args[0].clone())
        if function.overloadpacket is aten.is_pinned:
            return not on_gpu and self._is_pinned(args[0])
        if named.pop("pin_memory", False):
            return self._pin(function(**named))
        if not on_gpu and (device is None or torch.device(device).type != "cuda"):
            return function(**named)
        if others:
            shapes = [tuple(t.shape) for t in others]
            raise RuntimeError(
                f"expected all tensors to be on the same device: {function}, on the CPU {shapes}"
            )
        if function.overloadpacket in _WAITING:
            self.wait(str(function))
        given = tree_map(_held, named)
        if function._schema.is_mutable:
            self.do(lambda: function(**given), None)
            return args[0]
        return self.do(lambda: function(**given), tuple(on_gpu))

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        if isinstance(to, GpuTensor) == isinstance(source, GpuTensor):
            if isinstance(to, GpuTensor):
                self.do(lambda: to.held.copy_(_held(source)), None)
            else:
                to.copy_(source)
            return to
        memory = source if isinstance(to, GpuTensor) else to
        if not (non_blocking and self._is_pinned(memory)):
            self.wait(f"a copy of {tuple(source.shape)} by way of memory that is not pinned, or not queued")
        if isinstance(to, GpuTensor):
            if non_blocking and self._is_pinned(source):
                self._leaving.append((source, source.clone()))
            self.do(lambda: to.held.copy_(source), None)
        else:
            assert self._capture is None, "not simulated"
            if non_blocking and self._is_pinned(to):
                self._arriving.append((to, _held(source).clone()))
            else:
                to.copy_(_held(source))
        return to

    def _to_copy(self, function: Any, named: dict[str, Any], there: bool) -> Tensor:
        source = named["self"]
        was_there = isinstance(source, GpuTensor)
        given = tree_map(_held, named)
        if was_there and there:
            return self.do(lambda: function(**given), (source,))
        if was_there != there:
            if not was_there and self._is_pinned(source) and named.get("non_blocking"):
                self._leaving.append((source, source.clone()))
            else:
                self.wait(f"a copy of {tuple(source.shape)} between the devices")
        found = function(**given)
        if found is given["self"] and was_there != there:
            found = found.clone()
        if not there:
            return found
        return self.do(lambda: found.copy_(source), ())

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned


def to_gpu(module: nn.Module) -> nn.Module:
    """Move a module's parameters and buffers."""
    for each in module.modules():
        for table in (each._parameters, each._buffers):
            for name, tensor in table.items():
                if tensor is not None and not isinstance(tensor, GpuTensor):
                    table[name] = GpuTensor(tensor.detach())
    return module


@contextlib.contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """The machine has one GPU, in inference mode."""
    gpu = SimulatedGpu()
    with pytest.MonkeyPatch.context() as patches:
        gpu.replace_cuda(patches)
        SimulatedGpu.active = gpu
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") begins on the CPU
        try:
            with torch.inference_mode(), gpu:
                yield gpu
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
            SimulatedGpu.active = None
