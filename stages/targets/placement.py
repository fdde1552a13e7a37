"""Where a target's layers are: on one device, or spread over several by accelerate.

accelerate keeps what fits nowhere on the meta device and brings it in when its module runs; reading such a
parameter outside of a forward pass goes through here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def is_spread(model: nn.Module) -> bool:
    """Whether accelerate has hooks on the model's modules."""
    return len(getattr(model, "hf_device_map", {})) > 1


def input_device(model: Any) -> torch.device:
    """The device that token ids have to be on."""
    embeddings = model.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None)
    place = getattr(hook, "execution_device", None)
    return torch.device(place) if place is not None else embeddings.weight.device


def parameter_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's parameters by name with their content, wherever it is; tied ones once."""
    if not is_spread(model):
        yield from model.named_parameters()
        return
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        own = {name: id(parameter) for name, parameter in module.named_parameters(recurse=False)}
        values = module_values(module) if own.keys() and not set(own.values()) <= seen else {}
        for name, value in values.items():
            if own[name] not in seen:
                seen.add(own[name])
                yield f"{prefix}.{name}" if prefix else name, value


def module_values(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters by name with their content, wherever it is."""
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return dict(module.named_parameters(recurse=False))
    from accelerate.utils import align_module_device

    with align_module_device(module):
        return {name: value.detach().clone() for name, value in module.named_parameters(recurse=False)}
