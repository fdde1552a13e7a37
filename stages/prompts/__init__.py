"""Where prompts come from: built-in sets, JSON Lines and Parquet files anywhere, Hugging Face data sets."""

from stages.prompts.source import Prompt, iter_prompts, read_prompts

__all__ = ["Prompt", "iter_prompts", "read_prompts"]
