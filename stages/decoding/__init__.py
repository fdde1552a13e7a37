"""The lossless speculative engine: draft trees, drafters, sampling, verification, and the loop that joins
them."""

from stages.decoding.batch import GenerationRequest, GenerationResult, generate_batch
from stages.decoding.decoder import Decoder, DecodeStats
from stages.decoding.drafter import Drafter, Eagle3Drafter
from stages.decoding.model import EagleModel, Generation
from stages.decoding.sampling import SamplingParams
from stages.decoding.tree import DraftTree, TreeConfig

__all__ = [
    "DecodeStats",
    "Decoder",
    "DraftTree",
    "Drafter",
    "Eagle3Drafter",
    "EagleModel",
    "Generation",
    "GenerationRequest",
    "GenerationResult",
    "SamplingParams",
    "TreeConfig",
    "generate_batch",
]
