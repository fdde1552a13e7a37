"""Linear layers whose weights are stored in the order that the CPU op reads them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

DTYPES = (torch.bfloat16, torch.float32)


class Drawing(NamedTuple):
    """How outputs are chosen that need not be kept: temperatures, above 0, and the keys of the noise of each
    row, or one of all; none at all is greedy."""

    temperature: Sequence[float] = ()
    seed: Sequence[int] = ()
    sample: Sequence[int] = ()


class PackedLinear(nn.Module):
    """An ``nn.Linear`` for inference: [..., K] to [..., N], each row's bits the same whatever rows are
    beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # No buffers: a module looks those up in Python, and decoding asks for these in every cycle.
        self.packed: Tensor = torch.ops.eagle_cpu.pack(linear.weight.detach())
        self.bias: Tensor | None = None if linear.bias is None else linear.bias.detach()

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is a linear layer that can be packed."""
        return (
            type(module) is nn.Linear
            and module.weight.dtype in DTYPES
            and module.weight.device.type == "cpu"
            and module.in_features % 2 == 0
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.eagle_cpu.linear(x, self.packed, self.bias, self.out_features)

    def draw(self, x: Tensor, drawing: Drawing, position: Sequence[int]) -> list[int]:
        """An output of each row of [M, K], without the outputs: the first greatest, as `kernels.first_argmax`
        finds it, or one drawn as `kernels.draw_tokens` does, and -1 where two are so near that fp32 rounding
        decides."""
        if not drawing.temperature:
            return torch.ops.eagle_cpu.linear_argmax(x, self.packed, self.bias, self.out_features)
        return torch.ops.eagle_cpu.linear_draw(
            x, self.packed, self.bias, self.out_features, *drawing, position
        )


def pack_linears(module: nn.Module) -> None:
    """Let every linear layer within a module compute over packed weights; what it has besides stays."""
    for layer in list(module.modules()):
        if PackedLinear.fits(layer):
            layer.forward = PackedLinear(layer).forward  # type: ignore[arg-type]
