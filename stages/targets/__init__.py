"""The target model: finding it, loading it, its chat template, its identity and its feature taps."""

from stages.targets.forward import SlotForward, TargetStates
from stages.targets.resolve import resolve_target
from stages.targets.slots import SlotCache, SlotStep
from stages.targets.taps import FeatureTaps
from stages.targets.target import Target, choose_device, load_target, logit_scale

__all__ = [
    "FeatureTaps",
    "SlotCache",
    "SlotForward",
    "SlotStep",
    "Target",
    "TargetStates",
    "choose_device",
    "load_target",
    "logit_scale",
    "resolve_target",
]
