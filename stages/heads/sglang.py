"""What SGLang leaves out of a head: it loads the folder, and drops without a word what it has no place for.

From its ``models/llama_eagle3.py``, ``models/llama_eagle.py`` and ``models/llama.py``.
"""

from __future__ import annotations

from stages.heads.draft_head import DraftHeadConfig
from stages.heads.eagle3_config import Eagle3Config

ARCHITECTURES = ("LlamaForCausalLMEagle3", "LlamaForCausalLMEagle")
"""Those of heads that it has."""


def left_out_by_sglang(config: DraftHeadConfig) -> tuple[str, ...]:
    """Why SGLang would draft with another head than the one that was trained; empty if it would not."""
    if not isinstance(config, Eagle3Config):
        return (f"heads of kind {config.kind} in the form that eagle writes",)
    found = {
        "layers behind the first": config.num_hidden_layers > 1,  # it names and norms them otherwise
        "sliding_window": config.sliding_window is not None,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    return tuple(name for name, there in found.items() if there)
