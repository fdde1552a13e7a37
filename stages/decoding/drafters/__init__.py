"""Drafters: from what the target has verified to trees of what may come next, one small protocol for all."""

from stages.decoding.drafters.calibration import Calibration, Calibrations
from stages.decoding.drafters.choice import DrafterChoice, DrafterKind, drafter_of, make_drafter
from stages.decoding.drafters.draft_model import ModelDrafter
from stages.decoding.drafters.drafter import Drafter, NoDrafter, StateKind
from stages.decoding.drafters.eagle import EagleDrafter
from stages.decoding.drafters.medusa import MedusaDrafter
from stages.decoding.drafters.ngram import NgramDrafter
from stages.decoding.drafters.oracle import OracleDrafter

__all__ = [
    "Calibration",
    "Calibrations",
    "Drafter",
    "DrafterChoice",
    "DrafterKind",
    "EagleDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "OracleDrafter",
    "StateKind",
    "drafter_of",
    "make_drafter",
]
