"""Claims about a target that accelerate has spread over several places."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.features.states import target_states
from stages.features.target_files import target_weights
from stages.targets import FeatureTaps, load_target
from tests.features.families import make_batch
from tests.tiny import make_tiny_target

SPREAD = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.norm": "disk",
    **{f"model.layers.{layer}": "disk" if layer % 2 else "cpu" for layer in range(8)},
}


@pytest.mark.parametrize("tied", [False, True])
def test_a_target_with_every_other_layer_elsewhere_is_the_same_target_with_the_same_states(
    tied: bool, tmp_path: Path
) -> None:
    path = str(make_tiny_target(tmp_path / "tiny", tied=tied))
    whole = load_target(path, "cpu", "float32", decodes=False)
    spread = load_target(
        path, dtype="float32", decodes=False, device_map=SPREAD | {"lm_head": "cpu" if tied else "disk"}
    )
    assert any(parameter.is_meta for parameter in spread.model.parameters())
    assert spread.fingerprint == whole.fingerprint
    assert spread.device == torch.device("cpu")
    weights = target_weights(spread)
    assert weights.keys() == target_weights(whole).keys()
    for name, weight in target_weights(whole).items():
        assert torch.equal(weights[name], weight), name
    batch, layers, found = make_batch("0011111", "001111"), (2, 4, 5), []
    for target in (whole, spread):
        with FeatureTaps(target.decoder, layers) as taps:
            found.append(target_states(target, taps, batch))
    assert torch.equal(found[0].aux, found[1].aux)
    assert torch.equal(found[0].last, found[1].last)
    assert torch.equal(found[0].target_argmax, found[1].target_argmax)


def test_without_a_gpu_the_map_auto_is_main_memory(tiny_path: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    target = load_target(tiny_path, dtype="float32", decodes=False, device_map="auto")
    assert {str(parameter.device) for parameter in target.model.parameters()} == {"cpu"}
    assert target.device == torch.device("cpu")
