"""Heads to convert, and what became of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.artifacts import open_artifact
from stages.convert import stage
from stages.convert.config import ConvertConfig
from stages.errors import EagleError
from stages.heads import (
    DraftHead,
    MedusaHead,
    head_of,
    init_from_target,
    load_head,
)
from stages.progress import Reporter
from stages.targets import Target
from tests.train.chains import Rows

QUIET = Reporter(quiet=True)


def random_head(config: Any, target: Target) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = head_of(config)
        made.set_vocabulary(torch.randperm(300)[: config.draft_vocab_size].sort().values)
        for parameter in made.parameters():
            parameter.data.normal_(std=0.3)
    weights = {
        "embed_tokens.weight": target.model.get_input_embeddings().weight,
        "lm_head.weight": target.model.get_output_embeddings().weight,
    }
    if not isinstance(made, MedusaHead) or made.config.shared_output:
        init_from_target(made, weights, init="random")
    return made.eval().requires_grad_(False)


def convert(source: Path, output: Path, target: str | None, report: Reporter = QUIET, **settings: Any) -> Any:
    fields = {"source": str(source), "output": str(output), "target": target, "device": "cpu"}
    return stage.run(ConvertConfig(**(fields | settings)), report)


def refusal(source: Path, output: Path, target: str | None, **settings: Any) -> str:
    with pytest.raises(EagleError) as error:
        convert(source, output, target, **settings)
    assert "\n" not in str(error.value)
    assert not output.exists()
    return str(error.value)


def load(output: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_head(open_artifact(str(output), "head"), dtype=dtype, device="cpu")


def drafted(head: DraftHead) -> Tensor:
    """The logits of a head behind some states and tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        states = torch.randn(5, 96 if head.config.state == "aux" else 32)
        tokens = torch.randint(0, 300, (5,))
    if isinstance(head, MedusaHead):
        return head.logits(head(states))
    rows, logits = Rows(head), []
    for rows.position, (token, state) in enumerate(zip(tokens, states, strict=True)):
        hidden = head(token, head.fuse(state), torch.tensor(rows.position), rows.attend)
        logits.append(head.logits(hidden))
    rows.position += 1
    hidden = head(tokens[0], head.feedback(hidden), torch.tensor(rows.position), rows.attend)
    return torch.stack([*logits, head.logits(hidden)])


def assert_same(converted: DraftHead, head: DraftHead) -> None:
    assert converted.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(converted.state_dict()[name], tensor), name
    assert torch.equal(drafted(converted), drafted(head))


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: each for name, each in tensors.items() if name not in names}


def adding(**more: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name.replace("__", "."): tensor for name, tensor in more.items()}


SWITCHED = {"num_hidden_layers": 3, "fc_norm": True, "norm_output": True, "torch_dtype": "float32"}
