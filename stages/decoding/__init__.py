"""The lossless speculative engine: draft trees, drafters, sampling, verification, and the loop that joins
them."""

from stages.decoding.batch import GenerationResult, generate_batch
from stages.decoding.costs import Costs
from stages.decoding.drafters import Drafter, DrafterChoice, EagleDrafter, make_drafter
from stages.decoding.engine import Emission, Engine, GenerationRequest
from stages.decoding.logprobs import TokenLogprobs
from stages.decoding.model import EagleModel, Generation
from stages.decoding.planner import CostPlanner, Cycle, Decisions, FixedPlanner, Planner
from stages.decoding.sampling import SamplingParams
from stages.decoding.stats import DecodeStats
from stages.decoding.tree import DraftTree, TreeConfig, TreePlan

__all__ = [
    "CostPlanner",
    "Costs",
    "Cycle",
    "Decisions",
    "DecodeStats",
    "DraftTree",
    "Drafter",
    "DrafterChoice",
    "EagleDrafter",
    "EagleModel",
    "Emission",
    "Engine",
    "FixedPlanner",
    "Generation",
    "GenerationRequest",
    "GenerationResult",
    "Planner",
    "SamplingParams",
    "TokenLogprobs",
    "TreeConfig",
    "TreePlan",
    "generate_batch",
    "make_drafter",
]
