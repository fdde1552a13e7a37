"""Feature taps: the residual stream entering chosen decoder layers, caught by hooks without keeping the
others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stages.errors import EagleError

_STACKS = ("layers", "h", "blocks", "block")  # names in transformers' decoders


def eagle3_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The EAGLE-3 default: layers 2, L//2 and L-3, whose *inputs* are the low, mid and high features.

    Raises:
        EagleError: the target has too few layers for three distinct taps.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if len(set(layers)) < 3 or num_layers < 7:
        raise EagleError(
            f"EAGLE-3 takes features at layers 2, L//2 and L-3; a target of {num_layers} layers needs "
            "at least 7, or three layers of your choice (--layers)"
        )
    return layers


def check_feature_layers(layers: tuple[int, int, int], num_layers: int) -> tuple[int, int, int]:
    """`layers` if the target has them.

    Raises:
        EagleError: one is not below the number of layers, or is layer 0, whose input is the bare embedding.
    """
    if layers[0] < 1 or layers[2] >= num_layers:
        wrong = layers[0] if layers[0] < 1 else layers[2]
        raise EagleError(
            f"--layers {','.join(map(str, layers))}: {wrong} is not between 1 and {num_layers - 1}; a number "
            f"l is the state entering layer l of the target's {num_layers}, counted from 0"
        )
    return layers


def layer_stack(decoder: nn.Module) -> Sequence[nn.Module]:
    """The decoder layers of a model of transformers, first to last.

    Raises:
        EagleError: they are not where transformers' decoders have them.
    """
    for name in _STACKS:
        if isinstance(layers := getattr(decoder, name, None), nn.ModuleList):
            return list(layers)
    raise EagleError(
        f"the layers of {type(decoder).__name__} are not where transformers' decoders have them: use another "
        "target"
    )


def _remove_all(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


class FeatureTaps:
    """Catches the states entering ``layers`` of a decoder during its next forward.

    Equal to transformers' ``output_hidden_states[layer]`` for each of the layers. Use as a context
    manager, or keep it: the taps go when nothing holds it any more.
    """

    def __init__(self, decoder: nn.Module, layers: tuple[int, ...]) -> None:
        self._states: dict[int, Tensor] = {}
        self._layers = layers
        modules = layer_stack(decoder)
        hooks = [
            modules[layer].register_forward_pre_hook(_keeper(self._states, layer), with_kwargs=True)
            for layer in layers
        ]
        # The decoder may outlive the taps; its hooks hold the states alone, so that the taps can go.
        self._remove = finalize(self, _remove_all, hooks)

    def take(self, rows: Tensor | None = None, device: torch.device | None = None) -> Tensor:
        """The features of the last forward, concatenated low to high; forgets them.

        Args:
            rows: int64 [n], which of the B * N tokens; all by default.
            device: where they go; layers may be on several, by default they are on one.

        Returns:
            [B, N, len(layers) * h], with ``rows`` [n, len(layers) * h].
        """
        states = [self._states[layer] for layer in self._layers]
        self._states.clear()
        if rows is not None:
            states = [state.flatten(0, 1)[rows.to(state.device)] for state in states]
        return torch.cat([state.to(device or state.device) for state in states], dim=-1)

    def close(self) -> None:
        self._remove()

    def __enter__(self) -> FeatureTaps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _keeper(states: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[layer] = args[0] if args else kwargs["hidden_states"]

    return keep
