"""What commonly makes a head draft worse in serving than in training, each as a change that can be tried."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from stages.errors import EagleError
from stages.heads import DraftHead, Eagle3Head, MedusaHead, head_of
from stages.heads.eagle3_config import SWITCHES
from stages.targets import Target

Cause = Literal["feature layers", "RoPE", "norm", "embedding", "vocabulary map", "dtype", "decode loop"]

_THETAS = (10_000.0, 500_000.0, 1_000_000.0)
_EPSILONS = (1e-5, 1e-6)


@dataclass(frozen=True)
class Suspect:
    """One thing put otherwise.

    Attributes:
        change: what is put otherwise, as the end of "with ...".
        head: in place of the one that is served.
        layers: whose inputs are the features, in place of the head's; None for heads that draw on the last
            state.
        float32: whether target and head run in float32.
    """

    cause: Cause
    change: str
    head: DraftHead
    layers: tuple[int, ...] | None
    float32: bool = False


def layers_of(head: DraftHead, target: Target) -> tuple[int, ...] | None:
    """Feature layers as decoding takes them; None for a head that draws on the target's last state."""
    if not isinstance(head, Eagle3Head):
        return None
    return head.config.feature_layers or target.feature_layers


def inputs(head: DraftHead, target: Target, *, half: bool) -> Iterator[Suspect]:
    """What changes the states that the head is fed, or the tokens that its logits stand for.

    Args:
        half: whether target and head run in 16 bits, so that float32 is worth trying.
    """
    layers = layers_of(head, target)
    if layers is not None:
        for other in _other_layers(layers, target):
            yield Suspect("feature layers", f"the features of layers {_listed(other)}", head, other)
    for name, ids in _other_vocabularies(head):
        yield Suspect("vocabulary map", name, _with_vocabulary(head, ids), layers)
    if half:
        yield Suspect("dtype", "target and head in float32", head, layers, float32=True)


def maths(head: DraftHead, target: Target) -> Iterator[Suspect]:
    """What changes the head's own maths."""
    if isinstance(head, MedusaHead):
        return
    layers, config = layers_of(head, target), head.config
    changes: list[tuple[Cause, dict[str, Any]]] = [("RoPE", other) for other in _other_ropes(config, target)]
    changes += [("norm", {name: not getattr(config, name)}) for name in SWITCHES if hasattr(config, name)]
    epsilons = (getattr(target.config, "rms_norm_eps", None), *_EPSILONS)
    changes += [
        ("norm", {"rms_norm_eps": eps})
        for eps in dict.fromkeys(epsilons)
        if eps and eps != config.rms_norm_eps
    ]
    for cause, change in changes:
        if (variant := _with_config(head, change)) is not None:
            yield Suspect(cause, f"{'RoPE ' if cause == 'RoPE' else ''}{_assigned(change)}", variant, layers)
    embedding = target.model.get_input_embeddings().weight
    if head.embed_tokens.weight.shape == embedding.shape:
        other = copy.deepcopy(head)
        other.embed_tokens.weight.data.copy_(embedding.to(getattr(torch, config.torch_dtype)))
        yield Suspect("embedding", "the target's token embeddings", other, layers)


def _other_layers(layers: tuple[int, ...], target: Target) -> list[tuple[int, ...]]:
    last = target.config.num_hidden_layers - 1
    shifted = [tuple(layer + by for layer in layers) for by in (1, -1, 2, -2)]
    others = [other for other in shifted if min(other) >= 1 and max(other) <= last]
    with suppress(EagleError):  # a target of few layers has no default
        others.append(target.feature_layers)
    others.append(layers[::-1])
    return [other for other in dict.fromkeys(others) if other != layers]


def _other_vocabularies(head: DraftHead) -> list[tuple[str, Tensor]]:
    """Other readings of the map from draft ids to target ids: each int64 [Vd], in the order of the logits."""
    if not isinstance(head, Eagle3Head):
        return []
    readings = {
        "the draft vocabulary that t2d marks": head.t2d.nonzero()[:, 0],
        "d2t read as ids, not offsets": head.d2t,
    }
    current, size = head.draft_ids, len(head.t2d)
    return [
        (name, ids)
        for name, ids in readings.items()
        if ids.shape == current.shape
        and not torch.equal(ids, current)
        and 0 <= int(ids.min()) <= int(ids.max()) < size
    ]


def _with_vocabulary(head: DraftHead, ids: Tensor) -> DraftHead:
    variant = copy.deepcopy(head)
    assert isinstance(variant, Eagle3Head)
    variant.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
    return variant


def _other_ropes(config: Any, target: Target) -> list[dict[str, Any]]:
    rope = getattr(target.config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(target.config, "rope_theta", None)
    thetas = [theta for theta in dict.fromkeys((theta, *_THETAS)) if theta and theta != config.rope_theta]
    changes: list[dict[str, Any]] = [{"rope_theta": theta} for theta in thetas]
    if config.rope_scaling is not None:
        changes.append({"rope_scaling": None})
    elif rope.get("rope_type", "default") != "default":
        changes.append(
            {"rope_scaling": {name: value for name, value in rope.items() if name != "rope_theta"}}
        )
    return changes


def _with_config(head: DraftHead, changes: dict[str, Any]) -> DraftHead | None:
    """The same weights under another config; None if they do not fit it."""
    first = next(head.parameters())
    try:
        variant = head_of(head.config.model_copy(update=changes))
        variant.load_state_dict(head.state_dict())
    except (RuntimeError, ValueError, KeyError, TypeError):  # tensors too many or too few, scaling incomplete
        return None
    return variant.to(first.device, first.dtype).eval().requires_grad_(False)


def _listed(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))


def _assigned(changes: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in changes.items()
    )
