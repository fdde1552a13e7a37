"""The last decoder layer of a target, for a head to start from, read without loading the target."""

from __future__ import annotations

import re
from collections import defaultdict

from torch import Tensor

from stages.errors import EagleError
from stages.heads.draft_head import LAYER_PREFIX
from stages.targets.resolve import resolve_target
from stages.targets.stored import StoredWeights, local_folder

_LAYER = re.compile(r"(?P<stack>.*\blayers)\.(?P<number>\d+)\.(?P<name>.+)")


def last_layer(target: str) -> dict[str, Tensor]:
    """The tensors of the last layer by their names in it, such as ``layer.self_attn.q_proj.weight``.

    Args:
        target: a hub id, a model folder or ``builtin:smollm2``.

    Raises:
        EagleError: it cannot be found, or its weights are not stored in safetensors files under such names.
    """
    source = resolve_target(target)
    weights = None if source.gguf_file else StoredWeights.of(local_folder(source.path, target))
    if weights is None:
        raise EagleError(
            f"the weights of {target} are not in safetensors files, so no head can start from its last "
            "layer: use init random, or target"
        )
    stacks: defaultdict[str, defaultdict[int, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for stored in weights.files:
        if match := _LAYER.fullmatch(stored):
            stacks[match["stack"]][int(match["number"])][match["name"]] = stored
    decoders = [layers for stack, layers in stacks.items() if "vision" not in stack and "audio" not in stack]
    if not decoders:
        raise EagleError(
            f"the layers of {target} are not named as transformers names a decoder's, so no head can start "
            "from the last one: use init random, or target"
        )
    layers = max(decoders, key=len)
    return {f"{LAYER_PREFIX}{name}": weights.tensor(stored) for name, stored in layers[max(layers)].items()}
