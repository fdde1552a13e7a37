"""Where prompts come from: built-in sets, files of chat data anywhere, Hugging Face data sets."""

from stages.prompts.prompt import Prompt, Rejected
from stages.prompts.source import iter_prompts, read_prompts

__all__ = ["Prompt", "Rejected", "iter_prompts", "read_prompts"]
