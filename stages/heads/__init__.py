"""Draft heads: modules of each kind, vocabulary maps and the checkpoint folder that engines load."""

from stages.heads.checkpoint import head_files, load_head, read_config, speculators_files
from stages.heads.config import HeadKind, HeadOptions, HeadState
from stages.heads.decoder_head import Attend, DecoderHead
from stages.heads.draft_head import (
    DraftHead,
    DraftHeadConfig,
    HeadInit,
    HeadSize,
    head_of,
    init_from_target,
    make_head,
)
from stages.heads.eagle1 import Eagle1Head
from stages.heads.eagle1_config import Eagle1Config
from stages.heads.eagle3 import Eagle3Head
from stages.heads.eagle3_config import Eagle3Config
from stages.heads.medusa import MedusaHead
from stages.heads.medusa_config import MedusaConfig
from stages.heads.sglang import left_out_by_sglang
from stages.heads.target_layer import last_layer

__all__ = [
    "Attend",
    "DecoderHead",
    "DraftHead",
    "DraftHeadConfig",
    "Eagle1Config",
    "Eagle1Head",
    "Eagle3Config",
    "Eagle3Head",
    "HeadInit",
    "HeadKind",
    "HeadOptions",
    "HeadSize",
    "HeadState",
    "MedusaConfig",
    "MedusaHead",
    "head_files",
    "head_of",
    "init_from_target",
    "last_layer",
    "left_out_by_sglang",
    "load_head",
    "make_head",
    "read_config",
    "speculators_files",
]
