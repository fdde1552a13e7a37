"""What makes a target the same target: digests of its config, tokenizer, chat template and weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

from stages.artifacts import TargetFingerprint
from stages.targets.placement import parameter_values
from stages.targets.stored import StoredWeights
from stages.targets.tokenizer import tokenizer_digest

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
    name: str,
    model: nn.Module,
    config: Any,
    tokenizer: Any,
    dtype: torch.dtype,
    stored: StoredWeights | None = None,
) -> TargetFingerprint:
    """Identify a loaded target, however it was named and in whatever dtype it was loaded.

    ``weights`` digests every tensor's name and shape and an even sample of its values rounded to bfloat16:
    enough to tell two fine-tunes apart, without reading hundreds of gigabytes again.

    Args:
        stored: the files to take the sample from, as far as they have the model's own tensors. Values that
            were rounded to float16 on loading do not round to the same bfloat16.
    """
    settings = {key: value for key, value in config.to_dict().items() if key not in VOLATILE}
    return TargetFingerprint(
        name=name,
        config=_digest(json.dumps(settings, sort_keys=True, default=str)),
        tokenizer=tokenizer_digest(tokenizer),
        chat_template=_digest(str(tokenizer.chat_template)),
        weights=_weights(model, stored),
        dtype=str(dtype).removeprefix("torch."),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _weights(model: nn.Module, stored: StoredWeights | None) -> str:
    sampled = {}
    for name, loaded in parameter_values(model):
        tensor = loaded if stored is None else stored.get(name, loaded)
        flat = tensor.detach().view(-1)
        sample = flat[:: max(1, flat.numel() // VALUES_A_TENSOR)][:VALUES_A_TENSOR]
        values = sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes()
        sampled[name] = f"{name}{tuple(tensor.shape)}".encode() + values
    digest = hashlib.sha256()
    for name in sorted(sampled):
        digest.update(sampled[name])
    return digest.hexdigest()
