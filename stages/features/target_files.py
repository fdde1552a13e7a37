"""The `target/` folder of a features artifact: what training needs of the target without its layers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import safetensors.torch
from torch import Tensor, nn

from stages.artifacts import ArtifactWriter
from stages.features.layout import TARGET_FOLDER, WEIGHTS_FILE
from stages.targets import Target
from stages.targets.ends import final_norm
from stages.targets.placement import module_values


def write_target_files(writer: ArtifactWriter, target: Target) -> None:
    """Config, generation config, tokenizer with chat template, embeddings, lm_head and final norm."""
    for name, data in target_files(target).items():
        writer.add_file(name, data)


def target_files(target: Target) -> dict[str, bytes]:
    """The files of the folder by their path in the artifact."""
    files = {WEIGHTS_FILE: safetensors.torch.save(target_weights(target))}
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
                files[f"{TARGET_FOLDER}/{path.relative_to(folder).as_posix()}"] = path.read_bytes()
    return files


def target_weights(target: Target) -> dict[str, Tensor]:
    """The tensors of `weights.safetensors`, on the CPU, in the dtype the target runs in.

    Raises EagleError when the target's final norm is not where transformers' decoders have it.
    """
    embeddings = target.model.get_input_embeddings()
    lm_head = target.model.get_output_embeddings()
    weights = {
        "embed_tokens.weight": module_values(embeddings)["weight"],
        **_parameters("norm", final_norm(target.model)),
        **_parameters("lm_head", lm_head),
    }
    if lm_head.weight is embeddings.weight:
        del weights["lm_head.weight"]
    return {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}


def _parameters(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    named = module_values(module)
    return {f"{prefix}.{name}": named[name] for name in ("weight", "bias") if name in named}
