"""A head as the Hugging Face folder that engines load unchanged: ``config.json`` and ``model.safetensors``.

EAGLE-3 heads are loaded by vLLM, and by SGLang if it has a place for all of them (``stages.heads.sglang``);
EAGLE-1 and Medusa heads by vLLM. The last two use the target's whole output layer there: an EAGLE-1 head's
file has nothing of it, as the engine shares the target's; a Medusa head's file has one of that size, with
zeros for tokens that the head does not draft: their logits are 0, and those of likely tokens are larger. What
the head knows of its draft vocabulary lies beside, in ``draft/vocabulary.safetensors``, where engines do not
look: the ids, and for EAGLE-1 their output rows.

EAGLE-3 heads can be in the format of speculators instead (``stages.heads.speculators``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from stages.errors import EagleError
from stages.heads.draft_head import DraftHead, DraftHeadConfig, head_of
from stages.heads.eagle1_config import Eagle1Config
from stages.heads.eagle3 import Eagle3Head
from stages.heads.eagle3_config import Eagle3Config
from stages.heads.medusa import MedusaHead
from stages.heads.medusa_config import MedusaConfig
from stages.heads.speculators import (
    from_speculators,
    is_speculators,
    read_speculators,
    speculators_config,
    to_speculators,
)

if TYPE_CHECKING:
    from stages.artifacts import Artifact

WEIGHTS, CONFIG = "model.safetensors", "config.json"
VOCABULARY = "draft/vocabulary.safetensors"
_VOCABULARY_OF = {"eagle3": (), "eagle1": ("vocabulary", "lm_head.weight"), "medusa": ("vocabulary",)}
_MAPS = ("d2t", "t2d")
_KINDS: tuple[type[DraftHeadConfig], ...] = (Eagle3Config, Eagle1Config, MedusaConfig)


def head_files(head: DraftHead) -> dict[str, bytes]:
    """The files of the folder by path, weights in ``config.torch_dtype``; ids and marks as they are."""
    tensors = _stored_tensors(head)
    vocabulary = {name: tensors.pop(name) for name in _VOCABULARY_OF[head.kind]}
    if isinstance(head, MedusaHead) and head.config.shared_output:
        rows = tensors["lm_head.weight"]
        whole = rows.new_zeros(head.config.vocab_size, head.config.hidden_size)
        tensors["lm_head.weight"] = whole.index_copy(0, head.draft_ids.cpu(), rows)
    files = _files(head.config.to_hf(), tensors)
    return files | ({VOCABULARY: safetensors.torch.save(vocabulary)} if vocabulary else {})


def speculators_files(head: DraftHead, target: str, target_architectures: Sequence[str]) -> dict[str, bytes]:
    """The files of the folder in the format of speculators.

    Args:
        target: hub id or folder of the target, as whoever serves the head can find it.

    Raises:
        EagleError: the format has no place for such a head.
    """
    if not isinstance(head, Eagle3Head):
        raise EagleError(
            f"speculators has no format for heads of kind {head.kind}, only for eagle3: leave --to out"
        )
    tensors = {to_speculators(name): tensor for name, tensor in _stored_tensors(head).items()}
    return _files(speculators_config(head.config, target, target_architectures), tensors)


def _stored_tensors(head: DraftHead) -> dict[str, Tensor]:
    """By name, in the dtype of the file. A head of the whole vocabulary has no map, as vLLM wants none."""
    dtype = _dtype(head)
    left_out = _MAPS if _is_whole(head.config) else ()
    return {
        name: (tensor.detach().to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu()).contiguous()
        for name, tensor in head.state_dict().items()
        if name not in left_out
    }


def _dtype(head: DraftHead) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, head.config.torch_dtype)
    return dtype


def _is_whole(config: DraftHeadConfig) -> bool:
    """Whether an EAGLE-3 head drafts all of the target's vocabulary."""
    return isinstance(config, Eagle3Config) and config.draft_vocab_size == config.vocab_size


def _files(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, bytes]:
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return {CONFIG: text.encode(), WEIGHTS: safetensors.torch.save(tensors, metadata={"format": "pt"})}


def load_head(artifact: Artifact, *, dtype: torch.dtype, device: torch.device | str) -> DraftHead:
    """Load the head of a ``head`` artifact, ready to draft.

    Raises:
        EagleError: the config is of no kind of head that this version knows, or tensors are missing, unknown
            or of the wrong shape.
    """
    stored = json.loads(artifact.read(CONFIG))
    config = read_config(stored)
    with torch.device("meta"):
        expected = head_of(config).state_dict()
    tensors = _read(artifact, WEIGHTS)
    if is_speculators(stored):
        tensors = {from_speculators(name): tensor for name, tensor in tensors.items()}
    _check(f"{artifact.uri}/{WEIGHTS}", tensors, _stored_shapes(config, expected))
    if names := _VOCABULARY_OF[config.kind]:
        vocabulary = _read(artifact, VOCABULARY)
        _check(
            f"{artifact.uri}/{VOCABULARY}", vocabulary, {name: tuple(expected[name].shape) for name in names}
        )
        tensors |= vocabulary
    if isinstance(config, MedusaConfig) and config.shared_output:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][tensors["vocabulary"]]
    head = head_of(config)  # whose map is that of the whole vocabulary until another is loaded
    head.load_state_dict(tensors, strict=not _is_whole(config))
    return head.to(device=device, dtype=dtype).eval().requires_grad_(False)


def read_config(config: Mapping[str, object]) -> DraftHeadConfig:
    """The config of a head from its ``config.json``.

    Raises:
        EagleError: it is of no kind that this version knows, or fields are missing or of the wrong type.
    """
    if is_speculators(config):
        return read_speculators(config)
    for kind in _KINDS:
        if config.get("architectures") == [kind.architecture]:
            return kind.from_hf(config)
    known = ", ".join(kind.architecture for kind in _KINDS)
    raise EagleError(
        f"head architecture {config.get('architectures')} is not supported; expected one of {known}"
    )


def _stored_shapes(config: DraftHeadConfig, expected: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """What the main file holds by name."""
    beside = (*_VOCABULARY_OF[config.kind], *(_MAPS if _is_whole(config) else ()))
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items() if name not in beside}
    if isinstance(config, MedusaConfig) and config.shared_output:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _read(artifact: Artifact, name: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(artifact.read(name))
    except safetensors.SafetensorError as error:
        raise EagleError(f"{artifact.uri}/{name} is not readable ({error}); train the head again") from None


def _check(where: str, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    wrong = [
        *(f"missing {name}" for name in sorted(expected.keys() - tensors.keys())),
        *(f"unknown {name}" for name in sorted(tensors.keys() - expected.keys())),
        *(
            f"{name} has shape {tuple(tensors[name].shape)}, not {expected[name]}"
            for name in sorted(expected.keys() & tensors.keys())
            if tensors[name].shape != expected[name]
        ),
    ]
    if wrong:
        raise EagleError(f"{where} does not fit its config.json: {'; '.join(wrong[:4])}")
