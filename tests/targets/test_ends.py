"""A target's two ends say and compute what the whole target does, and its layers are not loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from stages.errors import EagleError
from stages.targets import load_target
from stages.targets.ends import TargetEnds, final_norm, load_target_ends
from tests.decoding.test_families import FAMILIES, build
from tests.tiny import make_tiny_target

FUSED = ("mixtral, experts", "qwen 3, experts")  # in memory; their files have each expert by itself


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "llama, tied", *FAMILIES])
def test_the_ends_are_those_of_the_whole_target(family: str, dtype: torch.dtype, folder: Path) -> None:
    path = folder / family.replace(" ", "").replace(",", "-")
    if not path.exists():
        make_tiny_target(path, vocab=300, tied=family.endswith("tied"))
        if family in FAMILIES:
            build(FAMILIES[family], "eager").save_pretrained(path)
    ends = load_target_ends(str(path), "cpu", dtype)
    whole = load_target(str(path), "cpu", str(dtype).removeprefix("torch."))
    assert isinstance(ends, TargetEnds) is (family not in FUSED)
    assert ends.fingerprint == whole.fingerprint
    assert (ends.eos_ids, ends.max_length, ends.feature_layers) == (
        whole.eos_ids,
        whole.max_length,
        whole.feature_layers,
    )
    states = torch.randn(3, whole.hidden_size, dtype=dtype)
    assert torch.equal(final_norm(ends.model)(states), final_norm(whole.model)(states))
    assert torch.equal(ends.logits(states), whole.logits(states))
    if family not in FUSED:
        assert {parameter.device.type for parameter in ends.decoder.layers.parameters()} == {"meta"}


def test_weights_in_several_files_are_found(folder: Path, tiny_path: str) -> None:
    path = folder / "split"
    make_tiny_target(path, vocab=300, hidden=32)
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    expected = load_target(str(path), "cpu", "float32").fingerprint
    (path / "model.safetensors").unlink()
    parts = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(sorted(tensors))}
    for part in set(parts.values()):
        mine = {name: tensors[name] for name in tensors if parts[name] == part}
        safetensors.torch.save_file(mine, path / part, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    ends = load_target_ends(str(path), "cpu", torch.float32)
    assert isinstance(ends, TargetEnds)
    assert ends.fingerprint == expected


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing-of-the-kind"}')
    with pytest.raises(EagleError, match="cannot load target"):
        load_target_ends(str(tmp_path), "cpu")
