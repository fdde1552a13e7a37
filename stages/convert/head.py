"""An EAGLE-3 head that another project trained -> ours: the same weights under our names, and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from stages.artifacts import TargetFingerprint, join
from stages.convert.config import ConvertConfig
from stages.convert.head_names import our_config, our_name, verifier
from stages.convert.pickles import DamagedError, load_pickle
from stages.convert.source import Source
from stages.convert.vocabulary import draft_ids
from stages.errors import EagleError
from stages.heads import Eagle3Config, Eagle3Head
from stages.progress import Reporter
from stages.targets import Target
from stages.targets.ends import load_target_ends

CONFIG = "config.json"
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_FREQUENCIES = "rotary_emb.inv_freq"  # kept by some versions; follows from the config
_EMBEDDING = "embed_tokens.weight"
_SHOWN = 4
_SAME = 0.02
"""Largest relative difference of a head's embeddings from the target's that rounding explains."""


@dataclass(frozen=True)
class ForeignHead:
    """A head in our own form, and the target it drafts for."""

    config: Eagle3Config
    module: Eagle3Head
    fingerprint: TargetFingerprint


def read_head(source: Source, config: ConvertConfig, report: Reporter) -> ForeignHead:
    """Reads the head in `source`, under whichever names.

    Raises:
        EagleError: it is another kind of drafter or a variant that our head does not compute, is for another
            target, or tensors are missing, unknown, of the wrong shape or not numbers.
    """
    where = join(source.uri, CONFIG)
    raw = _json(source, CONFIG)
    name = config.target or verifier(raw)
    if name is None:
        raise EagleError(f"{source.uri} does not say which target its head is for: give --target")
    tensors = _read_tensors(source)
    dtype = _dtype(tensors, source) if config.dtype == "auto" else getattr(torch, config.dtype)
    target = load_target_ends(name, "cpu", dtype)
    head_config = our_config(raw, target.config.num_hidden_layers, where)
    head_config = head_config.model_copy(update={"torch_dtype": str(dtype).removeprefix("torch.")})
    _check_target(head_config, target, where)
    with torch.device("meta"):
        head = Eagle3Head(head_config)
    weights = _ours(tensors, head, target, source, report)
    head.load_state_dict(weights, assign=True)
    return ForeignHead(head_config, head.to(dtype), target.fingerprint)


def _ours(
    tensors: dict[str, Tensor], head: Eagle3Head, target: Target, source: Source, report: Reporter
) -> dict[str, Tensor]:
    """All tensors of our head, in our order of the draft vocabulary."""
    config = head.config
    weights: dict[str, Tensor] = {}
    for theirs, tensor in sorted(tensors.items()):
        name = our_name(theirs)
        if name is None:
            continue
        if name in weights:
            raise EagleError(f"{source.uri} has two tensors for {name}, one of them {theirs}")
        if name.endswith(_FREQUENCIES):
            _check_frequencies(tensor, head, f"{source.uri}: {theirs}")
        else:
            weights[name] = tensor
    if _EMBEDDING not in weights:
        weights[_EMBEDDING] = target.model.get_input_embeddings().weight.detach()
        report.log(f"the head has no token embeddings: those of {target.name} are used")
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    _check_tensors(weights, head, source)
    _check_embeddings(weights[_EMBEDDING], target, report)
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
    ids, order = ids.sort()
    covered = torch.zeros(config.vocab_size, dtype=torch.bool)
    covered[ids] = True
    weights["lm_head.weight"] = weights["lm_head.weight"][order]
    return weights | {"d2t": ids - torch.arange(len(ids)), "t2d": covered}


def _check_tensors(weights: dict[str, Tensor], head: Eagle3Head, source: Source) -> None:
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
            f"{source.uri} is no EAGLE-3 head that this version runs: {'; '.join(wrong[:_SHOWN])}{more}"
        )


def _check_target(config: Eagle3Config, target: Target, where: str) -> None:
    for what, head, its in (
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if head != its:
            raise EagleError(
                f"{where} has {what} {head}, and --target {target.name} {its}: give the target that the head "
                "is for"
            )


def _check_embeddings(embeddings: Tensor, target: Target, report: Reporter) -> None:
    """Says so when they are not the target's: another target, or trained along."""
    theirs = target.model.get_input_embeddings().weight.float()
    far = (embeddings.float() - theirs).norm() / theirs.norm()
    if far > _SAME:
        report.log(
            f"warning: the head's token embeddings differ from those of {target.name} by {far:.0%}: unless "
            "they were trained along with it, it is another target's head"
        )


def _check_frequencies(stored: Tensor, head: Eagle3Head, where: str) -> None:
    ours = head.rotary.frequencies
    if stored.shape != ours.shape or not torch.allclose(stored.float(), ours, rtol=1e-2):
        raise EagleError(f"{where} are not the RoPE frequencies of its config.json: correct rope_theta there")


def _dtype(tensors: dict[str, Tensor], source: Source) -> torch.dtype:
    fc = next((tensor for name, tensor in tensors.items() if our_name(name) == "fc.weight"), None)
    if fc is None or fc.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        found = "no fc.weight" if fc is None else f"an fc.weight of {fc.dtype}"
        raise EagleError(f"{source.uri} is no EAGLE-3 head that this version runs: it has {found}")
    return fc.dtype


def _read_tensors(source: Source) -> dict[str, Tensor]:
    for whole in _WHOLE:
        if whole in source.sizes:
            return _tensors(source, whole)
        index = f"{whole}.index.json"
        if index in source.sizes:
            parts = sorted(set((_json(source, index).get("weight_map") or {}).values()))
            return {name: tensor for part in parts for name, tensor in _tensors(source, str(part)).items()}
    raise EagleError(f"{source.uri} has neither of {' and '.join(_WHOLE)}")


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
