"""A first look at a target before its states are stored: are they those that transformers shows?

Heads trained on other states than serving sees learn well and draft badly, and nothing says why. So a few
tokens are run once, and what the taps catch is compared with the model's own account of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.errors import EagleError
from stages.targets import FeatureTaps, Target

PROBE_TOKENS = 64

_ROUNDING = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative error below which two ways to the same states differ by rounding only."""


@torch.inference_mode()
def probe(target: Target, taps: FeatureTaps, layers: tuple[int, ...], input_ids: Tensor) -> None:
    """Runs the first tokens of `input_ids` int64 [n], n >= 2, twice side by side, once with another end.

    Raises:
        EagleError: the states at the taps are not `output_hidden_states` of their layers, the last one is not
            what the target's logits are made of, or a state depends on tokens behind it.
    """
    ids = input_ids[:PROBE_TOKENS]
    half = (len(ids) + 1) // 2
    other = torch.cat([ids[:half], ids[half:].roll(1).flip(0)])
    other[half:] = (other[half:] + 1) % target.vocab_size
    both = torch.stack([ids, other]).to(target.device)  # [2, n]
    shown = target.model(input_ids=both, use_cache=False, output_hidden_states=True)
    caught = taps.take(device=shown.logits.device)  # [2, n, 3h]
    last = target.decoder(input_ids=both, use_cache=False).last_hidden_state
    taps.take()

    expected = torch.cat([shown.hidden_states[layer].to(caught.device) for layer in layers], dim=-1)
    if caught.shape != expected.shape or not torch.equal(caught, expected):
        raise _unsuitable(target, "its layers are not entered by the states that transformers shows for them")
    rounding = _ROUNDING[target.dtype]
    if _difference(target.logits(last), shown.logits) > rounding:
        raise _unsuitable(target, "its logits are not made of its last state in a way that eagle knows")
    for states in (caught, last):
        if _difference(states[1, :half], states[0, :half]) > rounding:
            raise _unsuitable(target, "a token's state depends on the tokens behind it")


def _difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float(), expected.float().to(found.device)
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def _unsuitable(target: Target, reason: str) -> EagleError:
    return EagleError(
        f"target {target.name} is a {type(target.model).__name__}: {reason}, so a head cannot learn from it; "
        "use another target"
    )
