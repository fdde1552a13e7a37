"""Draft heads: modules, vocabulary map and the checkpoint folder that engines load."""

from stages.heads.checkpoint import head_files, load_head
from stages.heads.config import Eagle3Config
from stages.heads.eagle3 import Eagle3Head, init_from_target

__all__ = ["Eagle3Config", "Eagle3Head", "head_files", "init_from_target", "load_head"]
