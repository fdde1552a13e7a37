"""A target's two ends, its embeddings and what turns its last state into logits, without the layers between.

Enough for states that were taken elsewhere: to finish them, to see what the target makes of them, and to say
which target it was. A hundredth of the memory of the target, and no layer is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.artifacts import TargetFingerprint
from stages.errors import EagleError
from stages.targets.fingerprint import fingerprint
from stages.targets.resolve import resolve_target
from stages.targets.stored import StoredWeights, local_folder
from stages.targets.target import Target, choose_device, load_target

FINAL_NORMS = (  # names in transformers' decoders
    "norm",
    "final_layernorm",
    "final_layer_norm",
    "ln_f",
    "norm_f",
    "embedding_norm",
    "out_norm",
)


@dataclass(frozen=True)
class TargetEnds(Target):
    """A target whose layers are on the meta device: it has the embeddings, the final norm and the logits."""

    weights: StoredWeights

    @cached_property
    def fingerprint(self) -> TargetFingerprint:
        """As that of the whole target: of the layers a few values of each tensor are read."""
        stored: Any = _StoredParameters([name for name, _ in self.model.named_parameters()], self.weights)
        return fingerprint(self.name, stored, self.config, self.tokenizer, self.dtype)


@dataclass(frozen=True)
class _StoredParameters:
    """What a fingerprint looks at of a model."""

    names: list[str]
    weights: StoredWeights

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.weights.tensor(name)) for name in self.names)


def load_target_ends(name: str, device: str = "auto", dtype: torch.dtype = torch.bfloat16) -> Target:
    """Load what a target has at its two ends.

    Where the stored tensors are not the model's own (a ``.gguf`` file, quantised or fused weights, pickles)
    the whole target is loaded instead.

    Args:
        name: a hub id, a model folder, a ``.gguf`` file or ``builtin:smollm2``.
        device: where embeddings, norm and output layer go; ``auto``, ``cpu`` or ``cuda``.

    Raises:
        EagleError: it cannot be found, is not a causal language model, or the device is not there.
    """
    where, source = choose_device(device), resolve_target(name)
    if source.gguf_file is None:
        folder = local_folder(source.path, name)
        try:
            ends = _ends(name, folder, where, dtype)
        except Exception as error:  # what broken or foreign files raise has no common base
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise EagleError(f"cannot load target {name}: {reason}") from error
        if ends is not None:
            return ends
    return load_target(name, device=device, dtype=str(dtype).removeprefix("torch."), decodes=False)


def final_norm(model: Any) -> nn.Module:
    """The norm behind the last layer of a causal language model.

    Raises:
        EagleError: it is not where transformers' decoders have it.
    """
    decoder = model.get_decoder()
    for name in FINAL_NORMS:
        if isinstance(norm := getattr(decoder, name, None), nn.Module):
            return norm
    raise EagleError(f"{type(model).__name__} has no final norm that eagle knows: use another target")


def _ends(name: str, folder: Path, device: torch.device, dtype: torch.dtype) -> TargetEnds | None:
    """None when the stored tensors are not the model's parameters one by one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(folder)
    weights = StoredWeights.of(folder)
    if weights is None or getattr(config, "quantization_config", None):
        return None
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    shapes = weights.shapes()
    if any(shapes.get(each) != tuple(parameter.shape) for each, parameter in model.named_parameters()):
        return None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    modules = {model.get_input_embeddings(), model.get_output_embeddings(), final_norm(model)}
    names = {id(parameter): each for each, parameter in model.named_parameters()}
    loaded: dict[int, nn.Parameter] = {}  # tied ends share a parameter and go on sharing it
    for module in modules:
        for field, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in loaded:
                tensor = weights.tensor(names[id(parameter)]).to(device, dtype, copy=True)
                loaded[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
            setattr(module, field, loaded[id(parameter)])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return TargetEnds(
        name=name,
        model=model.eval().requires_grad_(False),
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        weights=weights,
    )
