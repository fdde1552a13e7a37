"""A head as the Hugging Face folder that vLLM and SGLang load unchanged: ``config.json`` and
``model.safetensors``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch
import torch

from stages.errors import EagleError
from stages.heads.config import Eagle3Config
from stages.heads.eagle3 import Eagle3Head

if TYPE_CHECKING:
    from stages.artifacts import Artifact

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def head_files(head: Eagle3Head) -> dict[str, bytes]:
    """The two files of the folder, weights in ``config.torch_dtype``; ``d2t`` int64 and ``t2d`` bool as
    they are."""
    dtype = getattr(torch, head.config.torch_dtype)
    tensors = {
        name: (tensor.detach().to("cpu", dtype) if tensor.is_floating_point() else tensor.cpu()).contiguous()
        for name, tensor in head.state_dict().items()
    }
    config = json.dumps(head.config.to_hf(), indent=2, sort_keys=True) + "\n"
    return {CONFIG: config.encode(), WEIGHTS: safetensors.torch.save(tensors, metadata={"format": "pt"})}


def load_head(artifact: Artifact, *, dtype: torch.dtype, device: torch.device | str) -> Eagle3Head:
    """Load the head of a ``head`` artifact, ready to draft.

    Raises:
        EagleError: the config is of another kind of head, or tensors are missing, unknown or of the wrong
            shape.
    """
    config = Eagle3Config.from_hf(json.loads(artifact.read(CONFIG)))
    try:
        tensors = safetensors.torch.load(artifact.read(WEIGHTS))
    except safetensors.SafetensorError as error:
        raise EagleError(
            f"{artifact.uri}/{WEIGHTS} is not readable ({error}); train the head again"
        ) from None
    with torch.device("meta"):
        head = Eagle3Head(config)
    expected = head.state_dict()
    wrong = [
        *(f"missing {name}" for name in sorted(expected.keys() - tensors.keys())),
        *(f"unknown {name}" for name in sorted(tensors.keys() - expected.keys())),
        *(
            f"{name} has shape {tuple(tensors[name].shape)}, not {tuple(expected[name].shape)}"
            for name in sorted(expected.keys() & tensors.keys())
            if tensors[name].shape != expected[name].shape
        ),
    ]
    if wrong:
        raise EagleError(f"{artifact.uri}/{WEIGHTS} does not fit its config.json: {'; '.join(wrong[:4])}")
    head = Eagle3Head(config)
    head.load_state_dict(tensors)
    return head.to(device=device, dtype=dtype).eval().requires_grad_(False)
