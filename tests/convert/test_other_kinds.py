"""EAGLE-1 and Medusa heads in the layouts of other projects become ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.heads import (
    Eagle1Config,
    Eagle1Head,
    MedusaConfig,
)
from stages.targets import Target
from tests.convert.foreign import (
    write_eagle1_head,
    write_medusa_heads,
)
from tests.convert.heads import (
    adding,
    assert_same,
    convert,
    load,
    random_head,
    refusal,
    without,
)


@pytest.mark.parametrize("changes", [{}, {"bias": True}, {"num_hidden_layers": 2}])
def test_eagle1_heads_go_through_the_targets_own_output(
    changes: dict[str, Any], target: Target, path: str, tmp_path: Path
) -> None:
    config = Eagle1Config.from_target(target.config, 300).model_copy(
        update={"torch_dtype": "float32"} | changes
    )
    made = random_head(config, target)
    convert(write_eagle1_head(tmp_path / "theirs", made), tmp_path / "ours", path)
    converted = load(tmp_path / "ours")
    assert isinstance(converted, Eagle1Head)
    assert converted.config == config
    assert_same(converted, made)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (adding(norm2__weight=torch.ones(32)), "is no EAGLE-1 head that this version runs: unknown norm2"),
        (
            adding(layers__0__input_layernorm__weight=torch.ones(32)),
            "unknown layers.0.input_layernorm.weight",
        ),
        (without("layers.0.mlp.up_proj.weight"), "missing layers.0.mlp.up_proj.weight"),
        (adding(lm_head__weight=torch.ones(300, 32)), "lm_head.weight is not the lm_head of"),
    ],
)
def test_tensors_that_do_not_fit_an_eagle1_head_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    complaint: str,
    target: Target,
    path: str,
    tmp_path: Path,
) -> None:
    made = random_head(Eagle1Config.from_target(target.config, 300), target)
    assert complaint in refusal(
        write_eagle1_head(tmp_path / "theirs", made, change=change), tmp_path / "x", path
    )


@pytest.mark.parametrize("shared", [True, False])
def test_medusa_heads_are_read_by_number(shared: bool, target: Target, path: str, tmp_path: Path) -> None:
    config = MedusaConfig.from_target(target.config, 300).model_copy(
        update={"heads": 4, "layers": 2, "torch_dtype": "float32", "shared_output": shared}
    )
    made = random_head(config, target)
    result = convert(write_medusa_heads(tmp_path / "theirs", made, path), tmp_path / "ours", None)
    assert "Medusa head of" in result.summary()
    converted = load(tmp_path / "ours")
    assert converted.config == config
    assert_same(converted, made)


def test_medusa_heads_of_a_reduced_vocabulary_are_put_in_order(
    target: Target, path: str, tmp_path: Path
) -> None:
    """As vLLM's converted heads have it: its names, and a map of tokens in an order of their own."""
    made = random_head(
        MedusaConfig.from_target(target.config, 40).model_copy(update={"torch_dtype": "float32"}), target
    )
    order = torch.randperm(40)

    def as_vllm(_: dict[str, Tensor]) -> dict[str, Tensor]:
        blocks = {name: tensor for name, tensor in made.state_dict().items() if name.startswith("blocks.")}
        return blocks | {"token_map": made.draft_ids[order], "lm_head.weight": made.lm_head.weight[order]}

    convert(write_medusa_heads(tmp_path / "theirs", made, path, change=as_vllm), tmp_path / "ours", path)
    assert_same(load(tmp_path / "ours"), made)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (adding(extra=torch.ones(1)), "is no Medusa head that this version runs: unknown extra"),
        (without("1.0.linear.weight"), "missing blocks.1.layers.0.weight"),
        (without("0.0.linear.weight"), "it has no blocks.0.layers.0.weight"),
        (adding(token_map=torch.tensor([3, 3])), "token_map is not one of distinct tokens"),
    ],
)
def test_medusa_heads_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    complaint: str,
    target: Target,
    path: str,
    tmp_path: Path,
) -> None:
    made = random_head(MedusaConfig.from_target(target.config, 300), target)
    source = write_medusa_heads(tmp_path / "theirs", made, path, change=change)
    assert complaint in refusal(source, tmp_path / "x", None)
