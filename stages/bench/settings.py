"""The flags of a run: what decides its result, and what its report says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stages.bench.config import BenchConfig
from stages.bench.line_up import LineUp
from stages.bench.prompt_sets import PromptSet
from stages.decoding import TreeConfig

# In the artifact's config under other names, or not deciding the result.
_NOT_IN_SETTINGS = {
    "target",
    "chat_template",
    "head",
    "prompts",
    "num_prompts",
    "output",
    "overwrite",
    "verify",
    "device",
    "dtype",
    "parity",
    "parity_rows",
    "trained_on",
    "compare",
    "fail_below",
    "timeout",
}
_OPTIONAL = (
    *("drafters", "endpoint", "launch", "concurrency", "request_rate", "repeat"),
    *("prompt_lengths", "check_lossless"),
)
_NO_SETTINGS = {"overwrite", "compare", "fail_below", "timeout"}


def artifact_config(config: BenchConfig, sets: Sequence[PromptSet], line_up: LineUp | None) -> dict[str, Any]:
    """What decides the result, besides the target and the heads, which have digests of their own."""
    # What is not asked for is left out, so that a report can be continued by a version that can do more.
    unasked = {
        name
        for name in _OPTIONAL
        if getattr(config, name) == BenchConfig.model_fields[name].get_default(call_default_factory=True)
    }
    chosen = {
        name: value
        for name, value in as_given(config).items()
        if name not in _NOT_IN_SETTINGS and name not in unasked
    }
    chosen["prompts"] = [each.identity() for each in sets]
    if line_up is None and config.target:  # only named, for the servers that are started
        return chosen | {"target": config.target, "head": config.head, "dtype": config.dtype}
    if line_up is None:
        return chosen
    return chosen | {"tree": _trees(config), "device": line_up.target.device.type}


def settings_of(config: BenchConfig, line_up: LineUp) -> dict[str, Any]:
    """The flags as given, with what they stood for on this machine."""
    return as_given(config) | {
        "tree": _trees(config),
        "device": line_up.target.device.type,
        "dtype": str(line_up.target.dtype).removeprefix("torch."),
    }


def as_given(config: BenchConfig) -> dict[str, Any]:
    """The flags; one temperature, one length or one tree is no list."""
    temperatures, lengths = config.temperatures, config.answer_lengths
    return config.model_dump(mode="json", exclude=_NO_SETTINGS) | {
        "temperature": temperatures[0] if len(temperatures) == 1 else list(temperatures),
        "max_new_tokens": lengths[0] if len(lengths) == 1 else list(lengths),
        "tree": config.tree[0] if len(config.tree) == 1 else config.tree,
    }


def _trees(config: BenchConfig) -> str | list[str]:
    trees = [str(TreeConfig.parse(tree)) for tree in config.tree]
    return trees[0] if len(trees) == 1 else trees
