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
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu.simulated_cuda import Graph, replace_cuda

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


class SimulatedGpu(TorchDispatchMode):
    """Sees every operation; enter ``simulated_gpu()``.

    waits: what the host has waited for; graphs: how many were captured; capturing: the one that is.
    """

    active: SimulatedGpu | None = None

    def __init__(self) -> None:
        super().__init__()
        self.strict = False
        self.waits: list[str] = []
        self.graphs = 0
        self.capturing: Graph | None = None
        self._pinned: dict[int, Tensor] = {}
        self._arriving: list[tuple[Tensor, Tensor]] = []  # pinned memory, and what will be in it
        self._leaving: list[tuple[Tensor, Tensor]] = []  # pinned memory, and what must still be in it

    @classmethod
    def current(cls) -> SimulatedGpu:
        assert cls.active is not None
        return cls.active

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
        if self.strict or self.capturing is not None:
            raise RuntimeError(f"called a synchronizing CUDA operation: {why}")
        self.waits.append(why)
        self.arrive()

    def arrive(self) -> None:
        """All that was queued is done."""
        assert self.capturing is None, "the host waits while a graph is captured"
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
        if self.capturing is not None:
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

            self.capturing.steps.append(again if views is not None else step)
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
            assert self.capturing is None, "memory is pinned while a graph is captured"
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
            assert self.capturing is None, "not simulated"
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
        replace_cuda(gpu, patches)
        SimulatedGpu.active = gpu
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") begins on the CPU
        try:
            with torch.inference_mode(), gpu:
                yield gpu
        finally:
            torch._C._set_only_lift_cpu_tensors(False)
            SimulatedGpu.active = None
