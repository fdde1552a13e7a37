"""What is no head that can be converted is refused by name; what is doubtful is pointed out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.heads import (
    Eagle3Head,
)
from stages.progress import Reporter
from tests.convert.foreign import (
    saved,
    write_eagle_head,
    write_speculators_head,
)
from tests.convert.heads import (
    adding,
    convert,
    refusal,
    without,
)
from tests.tiny import make_tiny_target


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            without("midlayer.hidden_norm.weight", "norm.weight"),
            "missing midlayer.hidden_norm.weight; missing norm",
        ),
        (without("lm_head.weight"), "missing lm_head.weight"),
        (without("fc.weight"), "no fc.weight"),
        (without("d2t"), "has no d2t"),
        (adding(fc__bias=torch.zeros(32)), "unknown fc.bias"),
        (adding(layers__1__mlp__up_proj__weight=torch.zeros(1)), "unknown layers.1.mlp.up_proj.weight"),
        (
            adding(layers__0__hidden_norm__weight=torch.zeros(32)),
            "two tensors for midlayer.hidden_norm.weight",
        ),
        (adding(norm__weight=torch.zeros(31)), r"norm.weight has shape (31,), not (32,)"),
        (adding(lm_head__weight=torch.full((40, 32), float("nan"))), "lm_head.weight holds NaN"),
        (
            adding(d2t=torch.zeros(40, dtype=torch.int64)),
            "fits neither as offsets nor as ids the t2d beside it",
        ),
        (adding(t2d=torch.ones(200, dtype=torch.bool)), "t2d has shape (200,)"),
        (adding(midlayer__self_attn__rotary_emb__inv_freq=torch.ones(8)), "are not the RoPE frequencies"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    complaint: str,
    path: str,
    head: Eagle3Head,
    tmp_path: Path,
) -> None:
    source = write_eagle_head(tmp_path / "theirs", head, change=change)
    assert complaint in refusal(source, tmp_path / "ours", path)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"fc_norm": True}, "missing fc_norm.0.weight"),
        ({"norm_before_fc": True}, "missing input_norm.weight"),
        ({"num_hidden_layers": 2}, "missing layers.1."),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE of type dynamic"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, "takes features at layers [1, 2, 8]"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["chunked_attention"], "sliding_window": 64}, "layer_types chunked_attention"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "takes features at layers [1, 2]"),
        ({"vocab_size": 301}, "has vocab_size 301, and --target"),
        ({"hidden_size": 64}, "has target_hidden_size 64, and --target"),
        ({"draft_vocab_size": 41}, "lm_head.weight has shape (40, 32), not (41, 32)"),
        ({"model_type": "mamba"}, "model_type mamba"),
        ({"hidden_size": None}, "cannot be read"),
    ],
)
def test_heads_that_compute_something_else_are_refused_by_name(
    config: dict[str, Any], complaint: str, path: str, head: Eagle3Head, tmp_path: Path
) -> None:
    source = write_eagle_head(tmp_path / "theirs", head, **config)
    assert complaint in refusal(source, tmp_path / "ours", path)


def test_drafters_of_other_kinds_are_refused(path: str, head: Eagle3Head, tmp_path: Path) -> None:
    convert(write_eagle_head(tmp_path / "theirs", head), tmp_path / "ours", path)
    assert "is an eagle artifact already" in refusal(tmp_path / "ours", tmp_path / "x", path)
    other = write_speculators_head(tmp_path / "dflash", head, path, speculators_model_type="dflash")
    assert "a drafter of type dflash" in refusal(other, tmp_path / "x", None)
    source = write_eagle_head(tmp_path / "bare", head)
    (source / "config.json").write_text('{"model_type": "llama"}')
    assert "has no hidden_size, intermediate_size" in refusal(source, tmp_path / "x", path)
    (source / "config.json").write_text("[]")
    assert "is not a JSON object" in refusal(source, tmp_path / "x", path)


def test_damaged_and_unsafe_files_are_refused(path: str, head: Eagle3Head, tmp_path: Path) -> None:
    source = write_eagle_head(tmp_path / "theirs", head)
    whole = (source / "pytorch_model.bin").read_bytes()
    (source / "pytorch_model.bin").write_bytes(whole[:-50])
    assert "cannot be read" in refusal(source, tmp_path / "x", path)
    (source / "pytorch_model.bin").write_bytes(saved(head))
    assert "holds more than tensors (stages.heads.eagle3.Eagle3Head)" in refusal(source, tmp_path / "x", path)
    (source / "pytorch_model.bin").write_bytes(saved({"state": {"fc.weight": torch.zeros(1)}}))
    assert "something else than tensors by name" in refusal(source, tmp_path / "x", path)


def test_embeddings_of_another_target_are_noticed(
    path: str, head: Eagle3Head, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_speculators_head(tmp_path / "theirs", head, path)
    convert(source, tmp_path / "right", path, Reporter())
    assert "warning" not in capsys.readouterr().err
    other = make_tiny_target(tmp_path / "other", vocab=300, hidden=32, seed=1)
    convert(source, tmp_path / "wrong", str(other), Reporter())
    assert "token embeddings differ from those of" in capsys.readouterr().err
