"""The README.md of a head's folder: what it is, what it was measured at, how to use it, what made it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages import __version__
from stages.artifacts import Parent, TargetFingerprint
from stages.config import several
from stages.train.config import RUNNING, TrainConfig

_NAMES = {"eagle3": "EAGLE-3", "eagle1": "EAGLE-1", "medusa": "Medusa"}
_VLLM_METHODS = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_LEFT_OUT = {*RUNNING} - {"features", "target", "dtype"}


def model_card(
    config: TrainConfig, target: TargetFingerprint | None, parents: Sequence[Parent], counts: dict[str, Any]
) -> str:
    """Markdown with the front matter of the Hugging Face hub. The same head has the same card,
    wherever it is.

    Args:
        counts: of the head's manifest.
    """
    name = target.name if target else "the target"
    kind = _NAMES[config.head]
    made_from = [f"- {parent.kind} `{parent.uri}`, digest `{parent.digest}`" for parent in parents]
    sections = [
        *_front_matter(config, name),
        f"# {kind} draft head for {name}",
        f"It drafts tokens that {name} then verifies, so that answers come sooner and are the target's "
        "own, token for token. It is of use with this target only.",
        "## Measured",
        _table(counts),
        "## Use",
        "`HEAD` is this folder.",
        "\n".join(f"    {line}" for line in _uses(config, name)),
        "`eagle bench` measures what it brings on your prompts, and that no token changes.",
        "## Made",
        f"By eagle {__version__}:",
        f"    {_command(config)}",
        "\n".join(["From", "", *made_from]),
        *_identity(target),
        "Settings and digests are in `manifest.json`, the course of the training in `metrics.jsonl` and "
        "`training.svg`.",
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(config: TrainConfig, name: str) -> list[str]:
    lines = ["---", "tags:", "- speculative-decoding", f"- {config.head}"]
    if _HUB_ID.fullmatch(name) and not Path(name).exists():
        lines[1:1] = [f"base_model: {name}"]
    return ["\n".join([*lines, "---"])]


def _uses(config: TrainConfig, name: str) -> list[str]:
    """Commands that serve the target with the head; vLLM does not find a built-in target."""
    speculation = {
        "method": _VLLM_METHODS[config.head],
        "model": "HEAD",
        "num_speculative_tokens": config.ttt_steps,
    }
    words = shlex.join(["vllm", "serve", name, "--speculative-config", json.dumps(speculation)])
    vllm = [] if name.startswith("builtin:") else [words]
    return [shlex.join(["eagle", "serve", "--target", name, "--head", "HEAD"]), *vllm]


def _table(counts: dict[str, Any]) -> str:
    rows = {
        "parameters": f"{counts['parameters'] / 1e6:.1f} M "
        f"({counts['parameters'] / counts['target_parameters']:.1%} of the target's)",
        "draft vocabulary": f"{several(counts['draft_vocab_size'], 'token')}, "
        f"{counts['draft_vocab_coverage']:.1%} of the answers' tokens",
        "trained on": f"{several(counts['train_rows'], 'conversation')}; "
        f"{several(counts['train_tokens'], 'response token')} in {several(counts['steps'], 'step')}",
    }
    held_out = counts.get("holdout") or {}
    if counts["holdout_rows"] and held_out:
        rows["held out"] = several(counts["holdout_rows"], "conversation")
        steps = len(held_out["agreement"])
        rows[f"agreement at draft steps 1 to {steps}"] = ", ".join(
            f"{share:.1%}" for share in held_out["agreement"]
        )
        rows[f"tokens a step, greedy chain of {steps}"] = f"{held_out['tokens_per_step']:.2f}"
    if parity := counts.get("parity"):
        rows[f"the same in decoding, {several(parity['rows'], 'conversation')}"] = (
            f"{parity['measured_tokens_per_step']:.2f}, where {parity['predicted_tokens_per_step']:.2f} is "
            "predicted"
        )
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in rows.items())])


def _command(config: TrainConfig) -> str:
    """The command that makes the same head, with what is not left at its default."""
    words = ["eagle", "train"]
    for field, about in TrainConfig.model_fields.items():
        value = getattr(config, field)
        if field in _LEFT_OUT or value == about.get_default(call_default_factory=True):
            continue
        flag = f"--{field.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag.removeprefix('--')}")
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [flag, shlex.quote(str(each))]
    return " ".join([*words, "--output", "HEAD"])


def _identity(target: TargetFingerprint | None) -> list[str]:
    if target is None:
        return []
    digests = {"config": target.config, "tokenizer": target.tokenizer, "weights": target.weights}
    named = ", ".join(f"{part} `{digest[:16]}`" for part, digest in digests.items())
    return [f"The target is {target.name} with {named}."]
