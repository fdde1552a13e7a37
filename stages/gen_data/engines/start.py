"""The engine that a user chose."""

from __future__ import annotations

import torch

from stages.gen_data.config import GenDataConfig
from stages.gen_data.engines.engine import AnswerEngine, TransformersEngine
from stages.targets import Target, load_target
from stages.targets.chat_template import with_chat_template
from stages.targets.ends import load_target_ends


def load_for_engine(config: GenDataConfig) -> Target:
    """The target, without its layers where something else runs them. Raises EagleError as `load_target`."""
    if config.engine == "transformers":
        target = load_target(config.target, device=config.device, dtype=config.dtype)
    else:
        dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
        target = load_target_ends(config.target, "cpu", dtype)
    return with_chat_template(target, config.chat_template)


def start_engine(config: GenDataConfig, target: Target) -> AnswerEngine:
    """Raises EagleError: the engine is not installed, cannot run the target, or cannot be reached."""
    if config.engine == "transformers":
        return TransformersEngine(target, config.batch_size)
    max_length = min(target.max_length, config.max_model_len or target.max_length)
    if config.engine == "vllm":
        from stages.gen_data.engines.vllm_engine import VllmEngine

        return VllmEngine(target, config.batch_size, max_length, config.tensor_parallel_size)
    from stages.gen_data.engines.openai_engine import OpenAiEngine

    assert config.base_url is not None  # the configuration has seen to it
    return OpenAiEngine(target, config.base_url, config.batch_size, max_length, config.served_model)
