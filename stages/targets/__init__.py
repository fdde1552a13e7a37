"""The target model: finding it, loading it, its chat template, its identity and its feature taps.

Names are imported when they are first used, so that what needs only a tokenizer does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.targets.forward import SlotForward, TargetStates
    from stages.targets.resolve import resolve_gguf, resolve_target
    from stages.targets.slots import SlotCache, SlotStep
    from stages.targets.taps import FeatureTaps
    from stages.targets.target import (
        Target,
        TemplateRefusalError,
        choose_device,
        load_target,
        logit_scale,
        logit_softcap,
    )

_MODULES = {
    "FeatureTaps": "taps",
    "SlotCache": "slots",
    "SlotForward": "forward",
    "SlotStep": "slots",
    "Target": "target",
    "TargetStates": "forward",
    "TemplateRefusalError": "target",
    "choose_device": "target",
    "load_target": "target",
    "logit_scale": "target",
    "logit_softcap": "target",
    "resolve_gguf": "resolve",
    "resolve_target": "resolve",
}

__all__ = [
    "FeatureTaps",
    "SlotCache",
    "SlotForward",
    "SlotStep",
    "Target",
    "TargetStates",
    "TemplateRefusalError",
    "choose_device",
    "load_target",
    "logit_scale",
    "logit_softcap",
    "resolve_gguf",
    "resolve_target",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
