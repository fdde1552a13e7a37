"""Targets made ready for decoding on a CPU: the memory they take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.cpu import load_ops
from stages.decoding import EagleModel
from stages.targets import load_target
from tests.tiny import make_tiny_target

pytestmark = pytest.mark.skipif(load_ops() is not None, reason=f"no CPU ops: {load_ops()}")


@pytest.mark.parametrize("tied", [False, True])
def test_a_target_whose_packed_weights_are_released_decodes_as_before(tmp_path: Path, tied: bool) -> None:
    target = load_target(str(make_tiny_target(tmp_path, tied=tied)), "cpu", "float32")
    model = EagleModel(target)
    before = model.generate([5, 6, 7], max_new_tokens=20, temperature=1.0, ignore_eos=True).token_ids
    size = sum(p.nbytes for p in target.model.parameters())
    embedding = target.model.get_input_embeddings().weight.nbytes
    freed = target.release_packed()
    left = sum(p.nbytes for p in target.model.parameters())
    assert freed == size - left
    assert left - embedding < 0.01 * size  # norms
    assert target.release_packed() == 0
    after = model.generate([5, 6, 7], max_new_tokens=20, temperature=1.0, ignore_eos=True).token_ids
    again = EagleModel(target).generate([5, 6, 7], max_new_tokens=20, temperature=1.0, ignore_eos=True)
    assert before == after == again.token_ids
    with pytest.raises(RuntimeError):  # and nothing makes up text of empty weights
        target.model(torch.tensor([[5, 6, 7]]))
