"""A head shared out over the processes that train it, by torch's FSDP2 (arXiv 1910.02054, stage 3).

Each process keeps its part of the rows of every trained weight, with their gradient and optimizer state. The
whole weights are there while a micro-batch is computed, and the gradients of all processes are summed into
the parts. What is never trained stays whole. A part is a ``DTensor``: the functions here take those as well
as plain tensors, which are the same whole ones in all processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from stages.train.ranks import Ranks


def shard(module: nn.Module, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> None:
    """Shares the trained weights of `module` out; its ``forward`` then is what needs them whole.

    Every process must call it, and ``backward`` of what it returns, equally often.

    Args:
        device: where the module is.
        dtype: of the weights while they are whole; the parts, and sums of gradients, are float32.
    """
    frozen = {parameter for parameter in module.parameters() if not parameter.requires_grad}
    shared = fully_shard(
        module,
        mesh=init_device_mesh(device.type, (ranks.size,)),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=None if dtype is torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        ignored_params=frozen,
    )
    # Losses are shares of the whole step's, so their gradients add up; gloo knows sums only.
    shared.set_gradient_divide_factor(1.0)
    shared.set_force_sum_reduction_for_comms(True)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """The weights of `module` are whole in the block, to be read; all processes enter it together."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, from the parts of all processes, which must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    """What this process has of a tensor; changing it changes the tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def fill(tensor: Tensor, given: Tensor | None, ranks: Ranks) -> None:
    """Gives `tensor` the values of the whole one `given` to the first process; all call this together."""
    source = tensor
    if isinstance(tensor, DTensor):
        source = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if given is not None:
        source.copy_(given)
    if isinstance(tensor, DTensor):
        part(tensor).copy_(part(distribute_tensor(source, tensor.device_mesh, tensor.placements)))
    else:
        ranks.copy([tensor])
