"""The `target/` folder of a features artifact: what training needs of the target without its layers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from stages.artifacts.store import ArtifactWriter
from stages.errors import EagleError
from stages.features.layout import TARGET_FOLDER, WEIGHTS_FILE
from stages.targets import Target

_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f")  # names in transformers' decoders


def write_target_files(writer: ArtifactWriter, target: Target) -> None:
    """Config, generation config, tokenizer with chat template, embeddings, lm_head and final norm."""
    writer.add_file(WEIGHTS_FILE, safetensors.torch.save(target_weights(target)))
    with tempfile.TemporaryDirectory(prefix="eagle-target-") as name:
        folder = Path(name)
        target.config.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)
        if target.model.generation_config is not None:
            # save_pretrained would refuse settings that the target's makers left inconsistent.
            text = target.model.generation_config.to_json_string()
            (folder / "generation_config.json").write_text(text, encoding="utf-8")
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                writer.add_file(f"{TARGET_FOLDER}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def target_weights(target: Target) -> dict[str, Tensor]:
    """The tensors of `weights.safetensors`, on the CPU, in the dtype the target runs in.

    Raises EagleError when the target's final norm is not where transformers' decoders have it.
    """
    embeddings = target.model.get_input_embeddings()
    lm_head = target.model.get_output_embeddings()
    weights = {"embed_tokens.weight": embeddings.weight, **_parameters("norm", final_norm(target.model))}
    weights |= _parameters("lm_head", lm_head)
    if lm_head.weight is embeddings.weight:
        del weights["lm_head.weight"]
    return {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}


def final_norm(model: Any) -> Any:
    decoder = model.get_decoder()
    for name in _FINAL_NORMS:
        if hasattr(decoder, name):
            return getattr(decoder, name)
    raise EagleError(f"{type(model).__name__} has no final norm that eagle knows: use another target")


def _parameters(prefix: str, module: Any) -> dict[str, Tensor]:
    named = {"weight": getattr(module, "weight", None), "bias": getattr(module, "bias", None)}
    return {f"{prefix}.{name}": tensor for name, tensor in named.items() if tensor is not None}
