"""At the end of training the head is decoded with, and fails if it does not do what training predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.artifacts import open_artifact
from stages.decoding.parity import RECORD_NAME, ParityRecord
from stages.errors import EagleError
from stages.progress import Reporter
from stages.targets import Target
from stages.train import stage
from stages.train.config import TrainConfig
from tests.overfit import features_artifact


def train(features: str, output: Path, **settings: Any) -> Any:
    fields = {"epochs": 4, "holdout": 0.5, "dtype": "float32", "device": "cpu", "batch_tokens": 64}
    config = TrainConfig(features=features, output=str(output), **(fields | settings))
    return stage.run(config, Reporter(quiet=True))


def test_what_is_predicted_is_confirmed_and_recorded(tiny_target: Target, tmp_path: Path) -> None:
    features = features_artifact(tmp_path / "features", tiny_target)
    result = train(features, tmp_path / "head")
    artifact = open_artifact(str(tmp_path / "head"), "head")
    parity = artifact.manifest.counts["parity"]
    assert isinstance(parity, dict)
    assert not parity["failed"]
    assert parity["rows"] == 5
    assert result.parity.measured_tokens_per_step == parity["measured_tokens_per_step"]
    assert len(ParityRecord.of(artifact).rows) == 5
    weights = [file.path for file in artifact.manifest.files if file.path.endswith(".safetensors")]
    assert [path for path in weights if "/" not in path] == ["model.safetensors"]  # engines load all of them
    assert train(features, tmp_path / "head").seconds == 0


def test_features_of_other_layers_than_they_say_fail_the_head_and_keep_it(
    tiny_target: Target, tmp_path: Path
) -> None:
    features = features_artifact(tmp_path / "features", tiny_target, layers=(3, 5, 6))
    for _ in ("made", "found complete"):
        with pytest.raises(
            EagleError, match=r"feature layers, for with the features of layers 3,5,6"
        ) as failed:
            train(features, tmp_path / "head")
        assert failed.value.result.holdout_rows
    assert open_artifact(str(tmp_path / "head"), "head").manifest.counts["parity"]


@pytest.mark.parametrize("settings", [{"parity_rows": 0}, {"holdout": 0}])
def test_it_can_be_left_out(tiny_target: Target, tmp_path: Path, settings: dict[str, Any]) -> None:
    train(features_artifact(tmp_path / "features", tiny_target), tmp_path / "head", **settings)
    manifest = open_artifact(str(tmp_path / "head"), "head").manifest
    assert not manifest.counts["parity"]
    recorded = any(file.path == RECORD_NAME for file in manifest.files)
    assert recorded == ("holdout" not in settings)


def test_a_target_that_has_no_room_here_costs_nothing_but_the_confirmation(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = features_artifact(tmp_path / "features", tiny_target)
    monkeypatch.setattr("stages.train.parity.free_bytes", lambda device: 1000)
    train(features, tmp_path / "head")
    assert not open_artifact(str(tmp_path / "head"), "head").manifest.counts["parity"]
