"""Heads of all kinds: making one, telling its size, and giving it what it has of the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from stages.errors import EagleError
from stages.heads.config import HeadKind, HeadOptions
from stages.heads.eagle1 import Eagle1Head
from stages.heads.eagle1_config import Eagle1Config
from stages.heads.eagle3 import Eagle3Head
from stages.heads.eagle3_config import Eagle3Config
from stages.heads.layers import DraftLayer, FusionLayer
from stages.heads.medusa import MedusaHead
from stages.heads.medusa_config import MedusaConfig

DraftHead = Eagle3Head | Eagle1Head | MedusaHead
DraftHeadConfig = Eagle3Config | Eagle1Config | MedusaConfig

HeadInit = Literal["random", "target", "layer"]
"""What a head starts from: nothing; the target's final norm and lm_head; those and the target's last layer.
"""

LAYER_PREFIX = "layer."
"""Of the names of the tensors of one of the target's layers, among the weights that a head starts from."""


def make_head(
    kind: HeadKind,
    target_config: Any,
    draft_vocab_size: int,
    *,
    feature_layers: tuple[int, int, int] | None = None,
    options: HeadOptions | None = None,
) -> DraftHead:
    """A head with random weights, from torch's generator; ``set_vocabulary`` and ``init_from_target`` come
    next.

    Args:
        target_config: the target's transformers config, or the dict of its ``config.json``.
        draft_vocab_size: number of target tokens the head can propose.
        feature_layers: those whose inputs an EAGLE-3 head is given; None for EAGLE-3's own.

    Raises:
        EagleError: no head can be shaped for the target, or an option means nothing to this kind.
    """
    config: DraftHeadConfig
    if kind == "eagle3":
        config = Eagle3Config.from_target(target_config, draft_vocab_size, feature_layers, options)
    elif kind == "eagle1":
        config = Eagle1Config.from_target(target_config, draft_vocab_size, options)
    else:
        config = MedusaConfig.from_target(target_config, draft_vocab_size, options)
    return head_of(config)


def head_of(config: DraftHeadConfig) -> DraftHead:
    """A head of this config with random weights, from torch's generator."""
    if isinstance(config, Eagle3Config):
        return Eagle3Head(config)
    if isinstance(config, Eagle1Config):
        return Eagle1Head(config)
    return MedusaHead(config)


@dataclass(frozen=True)
class HeadSize:
    """How large a head is beside its target; 2 to 5 % is the aim for targets of 7 billion and more."""

    parameters: int
    target_parameters: int

    @classmethod
    def of(cls, config: DraftHeadConfig, target_parameters: int) -> HeadSize:
        """Trained parameters against all of the target's."""
        return cls(config.num_parameters, target_parameters)

    @property
    def share(self) -> float:
        return self.parameters / self.target_parameters

    def __str__(self) -> str:
        """`8.8 M parameters, 6.5% of the target's`"""
        return f"{self.parameters / 1e6:.1f} M parameters, {self.share:.1%} of the target's"


def init_from_target(head: DraftHead, weights: Mapping[str, Tensor], *, init: HeadInit = "target") -> None:
    """Gives a head what it keeps of the target, and what it shall start from. ``set_vocabulary`` comes first.

    What is kept and never trained are the token embeddings (EAGLE) and the rows of the target's lm_head
    (EAGLE-1, Medusa). ``init`` is about the rest: EAGLE-3's ``norm`` and ``lm_head``, with "layer" also the
    decoder layers.

    Args:
        weights: ``embed_tokens.weight`` [V, h], ``norm.weight`` [h], unless tied ``lm_head.weight`` [V, h],
            and for "layer" those of a layer of the target with ``layer.`` before their names (see
            ``stages.heads.target_layer``).

    Raises:
        EagleError: the target's lm_head has a bias, and the head goes through it; or the target's layer does
            not fit the head's.
    """
    embedding = weights["embed_tokens.weight"]
    output = weights.get("lm_head.weight", embedding)
    with torch.no_grad():
        if isinstance(head, Eagle3Head):
            head.embed_tokens.weight.copy_(embedding)
            if init != "random":
                head.norm.weight.copy_(weights["norm.weight"])
                head.lm_head.weight.copy_(output[head.draft_ids])
        else:
            if "lm_head.bias" in weights:
                raise EagleError(
                    f"a head of kind {head.kind} goes through the target's lm_head without its bias, and "
                    "this target's has one: train a head of kind eagle3"
                )
            head.lm_head.weight.copy_(output[head.draft_ids])
            if isinstance(head, Eagle1Head):
                head.embed_tokens.weight.copy_(embedding)
        if init == "layer":
            _start_from_layer(head, weights)


def _start_from_layer(head: DraftHead, weights: Mapping[str, Tensor]) -> None:
    """Starts each decoder layer from the target's, and passes it the highest feature as it is.

    The part of the first projections that sees embeddings stays random. EAGLE-1 cannot start so: its states
    lie behind the target's final norm, and what a layer adds is of the scale before it.
    """
    if not isinstance(head, Eagle3Head):
        raise EagleError(f"a head of kind {head.kind} cannot start from the target's layer: use init random")
    h = head.config.hidden_size
    for layer in head.layers_in_order:
        _copy_layer(layer, weights, h)
    with torch.no_grad():
        head.fc.weight[:, :-h].zero_()
        head.fc.weight[:, -h:] = torch.eye(h)


_OF_BOTH = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
"""Those of EAGLE-3's first layer that see an embedding and a feature side by side."""


def _copy_layer(layer: DraftLayer, weights: Mapping[str, Tensor], hidden_size: int) -> None:
    first = isinstance(layer, FusionLayer)
    wrong = []
    for name, parameter in layer.named_parameters():
        if first and name == "input_layernorm.weight":
            continue  # it norms embeddings, which the target's layer never sees
        theirs = name.replace("hidden_norm", "input_layernorm")
        given = weights.get(f"{LAYER_PREFIX}{theirs}")
        part = parameter[:, hidden_size:] if first and name in _OF_BOTH else parameter
        if given is None or given.shape != part.shape:
            found = "missing" if given is None else f"of shape {tuple(given.shape)}, not {tuple(part.shape)}"
            wrong.append(f"{theirs} is {found}")
        else:
            with torch.no_grad():
                part.copy_(given)
    if wrong:
        raise EagleError(
            f"the head cannot start from the target's layer: {'; '.join(wrong[:3])}: use init random, or "
            "target"
        )
