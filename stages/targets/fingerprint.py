"""What makes a target the same target: digests of its config, tokenizer, chat template and weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from stages.artifacts import TargetFingerprint

VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "_attn_implementation",
    "attn_implementation",
}
VALUES_A_TENSOR = 512


def fingerprint(
    name: str, model: nn.Module, config: Any, tokenizer: Any, dtype: torch.dtype
) -> TargetFingerprint:
    """Identify a loaded target, however it was named and in whatever dtype it was loaded.

    ``weights`` digests every tensor's name and shape and an even sample of its values rounded to bfloat16:
    enough to tell two fine-tunes apart, without reading hundreds of gigabytes again.
    """
    settings = {key: value for key, value in config.to_dict().items() if key not in VOLATILE}
    return TargetFingerprint(
        name=name,
        config=_digest(json.dumps(settings, sort_keys=True, default=str)),
        tokenizer=_digest(_tokenizer_text(tokenizer)),
        chat_template=_digest(str(tokenizer.chat_template)),
        weights=_weights(model),
        dtype=str(dtype).removeprefix("torch."),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _tokenizer_text(tokenizer: Any) -> str:
    """The tokenizer as text, without truncation and padding, which every call may set anew."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return json.dumps(tokenizer.get_vocab(), sort_keys=True)
    plain = type(backend).from_str(backend.to_str())
    plain.no_truncation()
    plain.no_padding()
    return plain.to_str()


def _weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        flat = tensor.detach().view(-1)
        sample = flat[:: max(1, flat.numel() // VALUES_A_TENSOR)][:VALUES_A_TENSOR]
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
