"""The head that training starts from: a fresh one of the target's shape, or one that was trained before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.artifacts import Artifact, TargetFingerprint
from stages.errors import EagleError
from stages.features.source import FeatureSource
from stages.heads import DraftHead, HeadInit, HeadOptions, init_from_target, last_layer, load_head, make_head
from stages.progress import Reporter
from stages.train.config import TrainConfig
from stages.train.vocabulary import DraftVocabulary

_TARGET = ("config", "tokenizer", "weights")
"""What of a target's fingerprint decides its states; the chat template and the number format do not."""


def initial_head(
    config: TrainConfig,
    features: FeatureSource,
    vocabulary: DraftVocabulary,
    before: DraftHead | None,
    report: Reporter,
) -> DraftHead:
    """A head with fp32 weights on the CPU, a function of the seed, or with those of `before`.

    Raises:
        EagleError: `before` is of another shape, or the target's layer, if it is asked for, cannot be had.
    """
    if before is not None:
        head = _started(config, features, vocabulary, "random", {})
        copy_weights(head, before, config.init_from or "")
        return head
    if config.init == "layer":
        return _started(config, features, vocabulary, "layer", last_layer(_target_name(config, features)))
    if config.init != "auto" or config.head != "eagle3":  # the others have no such start
        init = "random" if config.init == "auto" else config.init
        return _started(config, features, vocabulary, init, {})
    name, why = target_at_hand(config, features), "the target is not at hand: give --target"
    if name is not None:
        try:
            return _started(config, features, vocabulary, "layer", last_layer(name))
        except EagleError as error:
            why = str(error)
    report.log(f"the head starts from random numbers, not from the target's last layer: {why}")
    return _started(config, features, vocabulary, "random", {})


def target_at_hand(config: TrainConfig, features: FeatureSource) -> str | None:
    """The target, where it is given, built in or a local path; None where it would have to be fetched."""
    name = config.target or (features.target.name if features.target else "")
    at_hand = config.target or name.startswith("builtin:") or (name and Path(name).expanduser().exists())
    return name if at_hand else None


def _started(
    config: TrainConfig,
    features: FeatureSource,
    vocabulary: DraftVocabulary,
    init: HeadInit,
    layer: dict[str, Tensor],
) -> DraftHead:
    torch.manual_seed(config.seed)
    head = _new_head(config, features, len(vocabulary.ids))
    head.set_vocabulary(vocabulary.ids)
    init_from_target(head, features.target_weights() | layer, init=init)
    return head


def open_before(artifact: Artifact, target: TargetFingerprint | None) -> DraftHead:
    """The head to start from, in fp32.

    Raises:
        EagleError: it cannot be loaded, or is another target's.
    """
    other = artifact.manifest.target
    if target is not None and other is not None:
        for part in _TARGET:
            if getattr(other, part) != getattr(target, part):
                raise EagleError(
                    f"--init-from {artifact.uri} is a head of {other.name}, and the features are of "
                    f"{target.name} (another {part}): start from a head of the same target, or from none"
                )
    return load_head(artifact, dtype=torch.float32, device="cpu")


def copy_weights(head: DraftHead, before: DraftHead, uri: str) -> None:
    """Gives `head` what was trained of `before`, name by name.

    Raises:
        EagleError: a tensor is missing, unknown or of another shape, or one of the two computes otherwise.
    """
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    frozen = {name for name, p in head.named_parameters() if not p.requires_grad}
    given = {name: p for name, p in before.named_parameters() if name not in frozen}
    wrong = [
        *(f"it lacks {name}" for name in sorted(trained.keys() - given.keys())),
        *(f"{name} is unknown" for name in sorted(given.keys() - trained.keys())),
        *(
            f"{name} has shape {tuple(given[name].shape)}, not {tuple(trained[name].shape)}"
            for name in sorted(trained.keys() & given.keys())
            if given[name].shape != trained[name].shape
        ),
        *_switches(head.config.model_dump(), before.config.model_dump()),
    ]
    if wrong:
        raise EagleError(
            f"--init-from {uri} does not fit the head to train ({'; '.join(wrong[:3])}): give the flags of "
            "its shape, or leave --init-from out"
        )
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(given[name])


def _target_name(config: TrainConfig, features: FeatureSource) -> str:
    name = config.target or (features.target.name if features.target else None)
    if name is None:
        raise EagleError(
            f"--init layer needs the target, and {features.parents[0].uri} does not name it: give --target"
        )
    return name


def _switches(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    return [
        f"{name} is {theirs.get(name)}, not {value}"
        for name, value in ours.items()
        if name != "torch_dtype" and theirs.get(name) != value
    ]


def _new_head(config: TrainConfig, features: FeatureSource, draft_vocab_size: int) -> DraftHead:
    options = HeadOptions(
        layers=config.head_layers,
        head_dim=config.head_dim,
        sliding_window=config.sliding_window,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )
    if config.head == "medusa":
        options = replace(options, heads=config.ttt_steps)
    head = make_head(
        config.head,
        features.target_config,
        draft_vocab_size,
        feature_layers=features.feature_layers,
        options=options,
    )
    head.config = head.config.model_copy(update={"torch_dtype": config.number_format})
    return head
