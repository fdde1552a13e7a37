"""Feature taps: the residual stream entering chosen decoder layers, caught by hooks without keeping the
others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stages.errors import EagleError


def eagle3_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The EAGLE-3 default: layers 2, L//2 and L-3, whose *inputs* are the low, mid and high features.

    Raises:
        EagleError: the target has too few layers for three distinct taps.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if len(set(layers)) < 3 or num_layers < 7:
        raise EagleError(
            f"EAGLE-3 takes features at layers 2, L//2 and L-3; a target of {num_layers} layers needs "
            "at least 7"
        )
    return layers


class FeatureTaps:
    """Catches the states entering ``layers`` of a decoder during its next forward.

    Equal to transformers' ``output_hidden_states[layer]`` for each of the layers. Use as a context
    manager, or keep it for the life of the model.
    """

    def __init__(self, decoder: nn.Module, layers: tuple[int, ...]) -> None:
        self._states: dict[int, Tensor] = {}
        self._layers = layers
        modules: Any = decoder.layers
        self._hooks = [
            modules[layer].register_forward_pre_hook(self._keeper(layer), with_kwargs=True)
            for layer in layers
        ]

    def _keeper(self, layer: int) -> Callable[..., None]:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._states[layer] = args[0] if args else kwargs["hidden_states"]

        return keep

    def take(self) -> Tensor:
        """The features of the last forward, concatenated low to high: [..., len(layers) * h]; forgets
        them."""
        features = torch.cat([self._states[layer] for layer in self._layers], dim=-1)
        self._states.clear()
        return features

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> FeatureTaps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
