"""Which kind of head the files of another project hold, and what our heads call its tensors.

EAGLE-3: EAGLE's own repositories and SpecForge name tensors as our head does and often leave out the
embeddings. speculators and vLLM have `layers.0.` for `midlayer.`; SGLang has `additional_layers.0.` for
`layers.1.`. EAGLE-1: as our head does, without the target's output layer.
Medusa: its own repository numbers everything, `<head>.<layer>.linear.weight`, and has an output layer as the
last layer of each head; vLLM has the names of our heads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from stages.errors import EagleError
from stages.heads import HeadKind

_PREFIXES = ("module.", "draft_model.", "model.", "medusa_heads.", "medusa_head.")
_COPIES = ("verifier_norm.", "verifier_lm_head.")  # the target's own weights, which some versions keep beside
_FURTHER = re.compile(r"additional_layers\.(\d+)\.(.+)")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(\d+)\.\d+\.weight")


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a config is one of speculators."""
    return "speculators_config" in raw or "speculators_model_type" in raw


def head_kind(raw: Mapping[str, Any], names: Collection[str], where: str) -> HeadKind:
    """By the config, or where it does not say, by the names of the tensors.

    Raises:
        EagleError: it is a drafter of another kind.
    """
    if is_speculators(raw):
        kind = raw.get("speculators_model_type") or (raw.get("speculators_config") or {}).get("algorithm")
        if kind != "eagle3":
            raise EagleError(
                f"{where} describes a drafter of type {kind}; of speculators' eagle convert reads eagle3"
            )
        return "eagle3"
    architecture = " ".join(map(str, raw.get("architectures") or ())).lower()
    if "medusa" in architecture or raw.get("model_type") == "medusa" or "medusa_num_heads" in raw:
        return "medusa"
    if "eagle3" in architecture:
        return "eagle3"
    if "eagle" in architecture:
        return "eagle1"
    bare = {_bare(name) for name in names}
    if any(name.startswith("midlayer.") for name in bare):
        return "eagle3"
    # Both have a layer 0; a head of EAGLE-3 has a norm and an output layer of its own behind it.
    layers = any(name.startswith("layers.0.") for name in bare)
    return "eagle1" if layers and bare.isdisjoint({"norm.weight", "d2t"}) else "eagle3"


def our_name(kind: HeadKind, name: str) -> str | None:
    """What the tensor is called in our head; None for a copy of the target's weights, which it has not."""
    name = _bare(name)
    if kind == "medusa":
        if match := _BLOCK.fullmatch(name):
            return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
        match = _OUTPUT.fullmatch(name)
        return f"lm_heads.{match[1]}.weight" if match else name
    if kind == "eagle1":
        return name
    if name.startswith(_COPIES):
        return None
    if name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    if match := _FURTHER.fullmatch(name):
        return f"layers.{int(match[1]) + 1}.{match[2].replace('hidden_norm', 'input_layernorm')}"
    return name


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
