"""A draft head that another project trained -> ours: the same weights under our names, and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from stages.artifacts import TargetFingerprint, join, open_artifact
from stages.convert.config import ConvertConfig
from stages.convert.head_config import eagle1_config, eagle3_config, medusa_config, verifier
from stages.convert.head_names import head_kind, our_name
from stages.convert.pickles import DamagedError, load_pickle
from stages.convert.source import Source
from stages.convert.vocabulary import draft_ids
from stages.errors import EagleError
from stages.heads import (
    DraftHead,
    DraftHeadConfig,
    Eagle1Config,
    Eagle3Config,
    HeadKind,
    MedusaConfig,
    MedusaHead,
    head_of,
    load_head,
    read_config,
)
from stages.progress import Reporter
from stages.targets import Target
from stages.targets.ends import load_target_ends
from stages.targets.hub import at_hand
from stages.targets.resolve import resolve_target

CONFIG = "config.json"
NAMES: dict[HeadKind, str] = {"eagle3": "EAGLE-3 head", "eagle1": "EAGLE-1 head", "medusa": "Medusa head"}
_WHOLE = ("model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
_FREQUENCIES = "rotary_emb.inv_freq"  # kept by some versions; follows from the config
_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
_FIRST: dict[HeadKind, str] = {
    "eagle3": "fc.weight",
    "eagle1": "fc.weight",
    "medusa": "blocks.0.layers.0.weight",
}
_SHOWN = 4
_SAME = 0.02
"""Largest relative difference of a head's copy of the target's weights from those that rounding explains."""


@dataclass(frozen=True)
class ForeignHead:
    """A head in our own form, and the target it drafts for."""

    module: DraftHead
    fingerprint: TargetFingerprint


def read_head(source: Source, config: ConvertConfig, report: Reporter) -> ForeignHead:
    """Reads the head in `source`, under whichever names.

    Raises:
        EagleError: it is another kind of drafter or a variant that our heads do not compute, is for another
            target, or tensors are missing, unknown, of the wrong shape or not numbers.
    """
    where = join(source.uri, CONFIG)
    raw = _json(source, CONFIG)
    stored = _read_tensors(source)
    kind = head_kind(raw, stored.keys(), where)
    name = config.target or verifier(raw)
    if name is None:
        raise EagleError(f"{source.uri} does not say which target its head is for: give --target")
    weights, frequencies = _renamed(stored, kind, source)
    dtype = _dtype(weights, kind, source) if config.dtype == "auto" else getattr(torch, config.dtype)
    target = load_target_ends(name, "cpu", dtype)
    head_config = _config(kind, raw, weights, target, where)
    head_config = head_config.model_copy(update={"torch_dtype": str(dtype).removeprefix("torch.")})
    _check_target(head_config, target, where)
    with torch.device("meta"):
        head = head_of(head_config)
    for theirs, tensor in frequencies.items():
        _check_frequencies(tensor, head, f"{source.uri}: {theirs}")
    weights = _completed(weights, head_config, head, target, source, report)
    head.load_state_dict(weights, assign=True)
    return ForeignHead(head.to(dtype), target.fingerprint)


def read_artifact(config: ConvertConfig) -> ForeignHead:
    """A head of ours, to be written in another format.

    Raises:
        EagleError: the artifact is none of a head, or damaged, or says nothing of a target.
    """
    artifact = open_artifact(config.source, "head")
    if artifact.manifest.target is None:
        raise EagleError(f"{config.source} does not say which target it is for: train the head again")
    dtype = (
        read_config(json.loads(artifact.read(CONFIG))).torch_dtype if config.dtype == "auto" else config.dtype
    )
    head = load_head(artifact, dtype=getattr(torch, dtype), device="cpu")
    head.config = head.config.model_copy(update={"torch_dtype": dtype})
    return ForeignHead(head, artifact.manifest.target)


def architectures(target: str) -> list[str]:
    """The classes that a target's config names.

    Raises:
        EagleError: the target is a built-in one, which only eagle finds, or its config cannot be had.
    """
    from transformers import AutoConfig

    source = resolve_target(target)
    if target.startswith("builtin:") or source.gguf_file:
        raise EagleError(
            f"{target} means nothing to other tools, and the folder names its target: give --target a model "
            "folder or a hub id"
        )
    path = at_hand(source.path)
    try:
        return list(AutoConfig.from_pretrained(path).architectures or [])
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise EagleError(f"the config of {target} cannot be read ({reason}): check --target") from None


def _renamed(
    stored: dict[str, Tensor], kind: HeadKind, source: Source
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors under our names, and RoPE frequencies under theirs."""
    weights: dict[str, Tensor] = {}
    frequencies: dict[str, Tensor] = {}
    for theirs, tensor in sorted(stored.items()):
        name = our_name(kind, theirs)
        if name is None:
            continue
        if name in weights:
            raise EagleError(f"{source.uri} has two tensors for {name}, one of them {theirs}")
        if name.endswith(_FREQUENCIES):
            frequencies[theirs] = tensor
        else:
            weights[name] = tensor
    return weights, frequencies


def _config(
    kind: HeadKind, raw: dict[str, Any], weights: dict[str, Tensor], target: Target, where: str
) -> DraftHeadConfig:
    if kind == "eagle3":
        return eagle3_config(raw, target.config.num_hidden_layers, where)
    if kind == "eagle1":
        return eagle1_config(raw, target.config, "fc.bias" in weights, where)
    drafted = weights.get("token_map")
    return medusa_config(
        weights, target.config, target.vocab_size if drafted is None else len(drafted), where
    )


def _completed(
    weights: dict[str, Tensor],
    config: DraftHeadConfig,
    head: DraftHead,
    target: Target,
    source: Source,
    report: Reporter,
) -> dict[str, Tensor]:
    """All tensors of our head: with what is the target's, the draft vocabulary in our order, and checked."""
    if isinstance(config, MedusaConfig):
        return _completed_medusa(weights, config, head, target, source)
    if _EMBEDDING not in weights:
        weights[_EMBEDDING] = target.model.get_input_embeddings().weight.detach()
        report.log(f"the head has no token embeddings: those of {target.name} are used")
    if isinstance(config, Eagle1Config):
        _take_output(weights, target, source)
        _check_tensors(weights, head, source)
        _check_embeddings(weights[_EMBEDDING], target, report)
        if config.bias:
            report.log("warning: fc has a bias, which vLLM does not load in an EAGLE-1 head; eagle does")
        return weights | {"vocabulary": torch.arange(config.vocab_size)}
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    _check_tensors(weights, head, source)
    _check_embeddings(weights[_EMBEDDING], target, report)
    ids = _eagle3_vocabulary(d2t, t2d, config, source)
    ids, order = ids.sort()
    covered = torch.zeros(config.vocab_size, dtype=torch.bool)
    covered[ids] = True
    weights[_OUTPUT] = weights[_OUTPUT][order]
    return weights | {"d2t": ids - torch.arange(len(ids)), "t2d": covered}


def _eagle3_vocabulary(
    d2t: Tensor | None, t2d: Tensor | None, config: Eagle3Config, source: Source
) -> Tensor:
    """Target ids in the head's order, int64 [Vd]."""
    if d2t is not None:
        ids = draft_ids(d2t, t2d, config.vocab_size, source.uri)
    elif config.draft_vocab_size == config.vocab_size:
        ids = torch.arange(config.vocab_size)
    else:
        raise EagleError(
            f"{source.uri} has no d2t, and its draft vocabulary of {config.draft_vocab_size} is not the "
            f"whole of {config.vocab_size}"
        )
    if len(ids) != config.draft_vocab_size:
        raise EagleError(
            f"{source.uri} has d2t of {len(ids)} tokens, and its config.json a draft_vocab_size of "
            f"{config.draft_vocab_size}"
        )
    return ids


def _completed_medusa(
    weights: dict[str, Tensor], config: MedusaConfig, head: DraftHead, target: Target, source: Source
) -> dict[str, Tensor]:
    ids = weights.pop("token_map", None)
    if ids is None:
        ids = torch.arange(config.vocab_size)
    elif not config.shared_output:
        raise EagleError(
            f"{source.uri} has a token_map and an output layer for each head; this version runs heads with "
            "one or the other"
        )
    ids, order = ids.long().sort()
    if not len(ids) or len(ids.unique()) != len(ids) or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise EagleError(f"{source.uri}: token_map is not one of distinct tokens of {target.name}")
    if config.shared_output:
        given = weights.get(_OUTPUT)
        if given is not None and len(given) == len(ids) != config.vocab_size:
            whole = torch.zeros_like(_output(target)).copy_(_output(target))
            whole[ids] = given[order].to(whole.dtype)
            weights[_OUTPUT] = whole
        _take_output(weights, target, source)
        weights[_OUTPUT] = weights[_OUTPUT][ids]
    _check_tensors(weights, head, source)
    return weights | {"vocabulary": ids}


def _output(target: Target) -> Tensor:
    """[V, h], the target's lm_head."""
    weight: Tensor = target.model.get_output_embeddings().weight
    return weight.detach()


def _take_output(weights: dict[str, Tensor], target: Target, source: Source) -> None:
    """Makes the target's own lm_head the head's; the one in the file, if there is one, has to be it."""
    ours = _output(target)
    if getattr(target.model.get_output_embeddings(), "bias", None) is not None:
        raise EagleError(
            f"the lm_head of {target.name} has a bias, and a head that goes through it would lack it: only "
            "EAGLE-3 heads of such a target can be used"
        )
    given = weights.get(_OUTPUT)
    if given is not None and (given.shape != ours.shape or _difference(given, ours) > _SAME):
        raise EagleError(
            f"{source.uri}: lm_head.weight is not the lm_head of {target.name}: give the target that the "
            "head is for"
        )
    weights[_OUTPUT] = ours


def _check_tensors(weights: dict[str, Tensor], head: DraftHead, source: Source) -> None:
    expected = {name: tensor.shape for name, tensor in head.named_parameters()}
    wrong = [
        *(f"missing {name}" for name in sorted(expected.keys() - weights.keys())),
        *(f"unknown {name}" for name in sorted(weights.keys() - expected.keys())),
        *(
            f"{name} has shape {tuple(weights[name].shape)}, not {tuple(expected[name])}"
            for name in sorted(expected.keys() & weights.keys())
            if weights[name].shape != expected[name]
        ),
    ]
    if not wrong:
        wrong = [
            f"{name} holds NaN or infinity" for name in sorted(weights) if not weights[name].isfinite().all()
        ]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise EagleError(
            f"{source.uri} is no {NAMES[head.kind]} that this version runs: {'; '.join(wrong[:_SHOWN])}{more}"
        )


def _check_target(config: DraftHeadConfig, target: Target, where: str) -> None:
    width = config.hidden_size if isinstance(config, MedusaConfig) else config.target_hidden_size
    for what, head, its in (
        ("target_hidden_size", width, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if head != its:
            raise EagleError(
                f"{where} has {what} {head}, and --target {target.name} {its}: give the target that the head "
                "is for"
            )


def _check_embeddings(embeddings: Tensor, target: Target, report: Reporter) -> None:
    """Says so when they are not the target's: another target, or trained along."""
    far = _difference(embeddings, target.model.get_input_embeddings().weight)
    if far > _SAME:
        report.log(
            f"warning: the head's token embeddings differ from those of {target.name} by {far:.0%}: unless "
            "they were trained along with it, it is another target's head"
        )


def _difference(given: Tensor, theirs: Tensor) -> float:
    """Relative to the size of `theirs`."""
    return float((given.float() - theirs.float()).norm() / theirs.float().norm())


def _check_frequencies(stored: Tensor, head: DraftHead, where: str) -> None:
    ours = None if isinstance(head, MedusaHead) else head.rotary.frequencies
    if ours is None or stored.shape != ours.shape or not torch.allclose(stored.float(), ours, rtol=1e-2):
        raise EagleError(f"{where} are not the RoPE frequencies of its config.json: correct rope_theta there")


def _dtype(weights: dict[str, Tensor], kind: HeadKind, source: Source) -> torch.dtype:
    name = _FIRST[kind]
    first = weights.get(name)
    if first is None or first.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        found = f"no {name}" if first is None else f"a {name} of {first.dtype}"
        raise EagleError(f"{source.uri} is no {NAMES[kind]} that this version runs: it has {found}")
    return first.dtype


def _read_tensors(source: Source) -> dict[str, Tensor]:
    for whole in _WHOLE:
        if whole in source.sizes:
            return _tensors(source, whole)
        index = f"{whole}.index.json"
        if index in source.sizes:
            parts = sorted(set((_json(source, index).get("weight_map") or {}).values()))
            return {name: tensor for part in parts for name, tensor in _tensors(source, str(part)).items()}
    raise EagleError(f"{source.uri} has none of {', '.join(_WHOLE)}")


def _tensors(source: Source, name: str) -> dict[str, Tensor]:
    where = join(source.uri, name)
    data = source.read(name)
    try:
        content: Any = (
            safetensors.torch.load(data) if name.endswith(".safetensors") else load_pickle(data, where)
        )
    except (SafetensorError, DamagedError) as error:
        raise EagleError(f"{where} cannot be read ({error}): fetch it again") from None
    if not isinstance(content, dict) or not all(isinstance(each, Tensor) for each in content.values()):
        raise EagleError(f"{where} holds something else than tensors by name")
    return dict(content)


def _json(source: Source, name: str) -> dict[str, Any]:
    try:
        content = json.loads(source.read(name))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise EagleError(f"{join(source.uri, name)} is not a JSON object")
    return content
