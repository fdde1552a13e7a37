"""The processes that train one head together, as torchrun starts them; one process is a group of one.

Each takes its share of every optimizer step's rows, and has the whole head, or its part of it
(`stages.train.sharding`). What is summed over them is counts, losses and gradients, so a step is the same
step however many take it, up to the order of additions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stages.errors import EagleError


@dataclass(frozen=True)
class Ranks:
    """This process among those that train."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and reports."""
        return self.rank == 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replaces tensors of one dtype by their sums over all processes, in one message."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, summed in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))

    def most(self, here: int, device: torch.device) -> int:
        """The largest of all processes' numbers."""
        if self.size == 1:
            return here
        largest = torch.tensor([here], device=device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest.item())

    def told(self, what: Any) -> Any:
        """What the first process says; the others' argument is ignored."""
        if self.size == 1:
            return what
        box = [what]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Replaces the tensors by those of the first process."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The processes that torchrun started, connected by nccl on GPUs and by gloo elsewhere; each has one GPU.

    Raises:
        EagleError: there are fewer GPUs than processes on this machine, or another process has gone.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        if local >= torch.cuda.device_count():
            raise EagleError(
                f"process {local} of this machine has no GPU, there are {torch.cuda.device_count()}: start "
                "as many with torchrun --nproc-per-node"
            )
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    except RuntimeError as error:
        if "by peer" not in str(error):  # how gloo says that a connection was closed
            raise
        raise EagleError(
            "another process of this training has ended, and its own message says why: run the same command "
            "again when that is mended"
        ) from error
    finally:
        dist.destroy_process_group()
