"""`eagle bench --parity` on heads of eagle train, as they are and with their folder tampered with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from pydantic import ValidationError

from stages.artifacts import ArtifactWriter, open_artifact
from stages.artifacts.conversations import Conversation, shard_name, write_conversations
from stages.bench import stage
from stages.bench.config import BenchConfig
from stages.bench.parity import ParityResult
from stages.bench.result import BenchResult
from stages.decoding.parity import ParityRecord
from stages.errors import EagleError
from stages.features.joined import place_of
from stages.features.layout import read_feature_shards
from stages.heads import head_files
from stages.inspect import stage as inspect
from stages.inspect.config import InspectConfig
from stages.progress import Reporter
from stages.targets import Target
from stages.train import stage as train
from stages.train.config import TrainConfig
from stages.train.parity import as_saved
from tests.overfit import answered_rows, features_artifact, overfitted_head
from tests.tiny import write_jsonl

LEARNT = ("rain", "snow", "wind", "stars", "trees")
BROKEN: dict[str, dict[str, Any]] = {
    "whole": {},
    "layers": {"eagle_aux_hidden_state_layer_ids": [3, 5, 6]},
    "theta": {"rope_theta": 1e6},
    "vocabulary": {"shuffled": True},
}


@pytest.fixture(scope="module")
def features(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    return features_artifact(tmp_path_factory.mktemp("parity") / "features", tiny_target)


def trained(output: Path, **settings: Any) -> str:
    fields = {"holdout": 0.5, "dtype": "float32", "device": "cpu", "batch_tokens": 64, "parity_rows": 0}
    train.run(TrainConfig(output=str(output), **(fields | settings)), Reporter(quiet=True))
    return str(output)


@pytest.fixture(scope="module")
def head(features: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(tmp_path_factory.mktemp("parity") / "head", features=features, epochs=4)


def check(target: Target, head: str, output: Path, **settings: Any) -> ParityResult:
    fields = {"target": target.name, "head": head, "output": str(output), "parity": True}
    config = BenchConfig(**(fields | {"dtype": "float32", "device": "cpu"} | settings))
    result = stage.run(config, Reporter(quiet=True))
    assert isinstance(result, ParityResult)
    return result


def tampered(head: str, folder: Path, *, shuffled: bool = False, **config: Any) -> str:
    """A copy of the head whose config.json says something else, or whose draft ids stand for other tokens."""
    original = open_artifact(head, "head")
    with ArtifactWriter.open(
        str(folder), "head", {}, parents=original.manifest.parents, target=original.manifest.target
    ) as writer:
        for file in original.manifest.files:
            data = original.read(file.path)
            if file.path == "config.json":
                data = json.dumps(json.loads(data) | config).encode()
            if file.path == "model.safetensors" and shuffled:
                tensors = safetensors.torch.load(data)
                places = torch.arange(len(tensors["d2t"]))
                tensors["d2t"] = (places + tensors["d2t"]).roll(7) - places
                data = safetensors.torch.save(tensors)
            writer.add_file(file.path, data)
        writer.finish({})
    return str(folder)


def test_a_head_as_it_was_trained_passes(tiny_target: Target, head: str, tmp_path: Path) -> None:
    result = check(tiny_target, head, tmp_path / "report")
    assert result.parity.predicted_tokens_per_step == result.parity.measured_tokens_per_step
    assert "\nLogits: within " in result.summary()
    again = check(tiny_target, head, tmp_path / "report")
    assert (again.seconds, again.parity) == (0, result.parity)
    shown = inspect.run(InspectConfig(uri=result.output, rows="1"), Reporter(quiet=True))
    assert shown.counts["parity"]["measured_tokens_per_step"] == result.parity.measured_tokens_per_step
    assert shown.shown.totals == {"parity": result.parity.model_dump(mode="json")}


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (BROKEN["layers"], "feature layers"),
        (BROKEN["theta"], "RoPE"),
    ],
)
def test_a_broken_head_fails_after_the_report_which_names_its_fault(
    tiny_target: Target, head: str, tmp_path: Path, config: dict[str, Any], cause: str
) -> None:
    broken = tampered(head, tmp_path / "head", **config)
    for _ in ("made", "found complete"):
        with pytest.raises(EagleError, match=f"the likely cause: {cause}") as raised:
            check(tiny_target, broken, tmp_path / "report")
        assert raised.value.result.parity.cause == cause
        assert "\nWhat is left of the difference with " in raised.value.result.summary()
    assert open_artifact(str(tmp_path / "report"), "report").manifest.counts["parity"]


def test_a_broken_head_drafts_worse_and_changes_no_text(tiny_target: Target, tmp_path: Path) -> None:
    """That parity names all three faults is shown in tests/decoding/test_parity.py."""
    learnt = overfitted_head(tiny_target, answered_rows(tiny_target, len(LEARNT), 16))
    head = str(tmp_path / "head")
    with ArtifactWriter.open(head, "head", {}, target=tiny_target.fingerprint) as writer:
        for name, data in head_files(as_saved(learnt)).items():
            writer.add_file(name, data)
        writer.finish({})
    prompts = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": f"tell me {word}"} for word in LEARNT])
    accepted = {}
    for name, changes in BROKEN.items():
        uri = tampered(head, tmp_path / name, **changes)
        fields = {"target": tiny_target.name, "prompts": [str(prompts)], "max_new_tokens": 16}
        fields |= {"tree": "chain:depth=3", "dtype": "float32", "device": "cpu"}
        config = BenchConfig(head=uri, output=str(tmp_path / f"{name}-report"), **fields)
        result = stage.run(config, Reporter(quiet=True))
        assert isinstance(result, BenchResult)
        assert result.lossless.identical == result.lossless.requests == len(LEARNT)
        accepted[name] = result.pooled.accepted_per_step
    assert accepted["whole"] > 0.2
    assert accepted["vocabulary"] < accepted["whole"]
    assert max(accepted.values()) == accepted["whole"]  # what is learnt by heart may not need the others


def test_features_that_have_moved_or_are_others(tiny_target: Target, features: str, tmp_path: Path) -> None:
    home = tmp_path / "features"
    shutil.copytree(features, home)
    head = trained(tmp_path / "head", features=str(home), epochs=1)
    home.rename(tmp_path / "moved")
    with pytest.raises(EagleError, match=r"was trained on it: say where it is with --trained-on$"):
        check(tiny_target, head, tmp_path / "report")
    assert check(tiny_target, head, tmp_path / "report", trained_on=str(tmp_path / "moved"))
    others = features_artifact(tmp_path / "others", tiny_target, layers=(1, 2, 3))
    with pytest.raises(
        EagleError, match=r"are not the features that .* was trained on: give those as --trai"
    ):
        check(tiny_target, head, tmp_path / "report2", trained_on=others)


def test_a_head_trained_on_several_features_is_replayed_from_all(
    tiny_target: Target, features: str, tmp_path: Path
) -> None:
    sampled = features_artifact(tmp_path / "sampled", tiny_target, temperature=1.0)
    head = trained(tmp_path / "head", features=[features, sampled], epochs=2)
    record = ParityRecord.of(open_artifact(head, "head"))
    found = check(tiny_target, head, tmp_path / "report").parity
    places = [place_of(row.row_id)[0] for row in record.rows]
    assert found.rows > max(places.count(0), places.count(1))
    assert found.logits_compared
    with pytest.raises(EagleError, match=r"trained on 2 artifacts and --trained-on names 1: give each"):
        check(tiny_target, head, tmp_path / "report2", trained_on=features)


def test_a_head_trained_on_the_fly_is_replayed_from_its_conversations(
    tiny_target: Target, features: str, tmp_path: Path
) -> None:
    """Its states are nowhere, so no logits are compared."""
    rows = [row for shard in read_feature_shards(open_artifact(features, "features")) for row in shard.rows()]
    conversations = [
        Conversation(str(row.row_id), "", "", "", [], row.input_ids.tolist(), row.loss_mask.tolist(), "stop")
        for row in rows
    ]
    uri = str(tmp_path / "conversations")
    with ArtifactWriter.open(uri, "conversations", {}, target=tiny_target.fingerprint) as writer:
        writer.add_shard(shard_name(0), write_conversations(conversations), rows=len(conversations))
        writer.finish({})
    head = trained(
        tmp_path / "head", conversations=uri, target=tiny_target.name, target_dtype="float32", epochs=1
    )
    parity = check(tiny_target, head, tmp_path / "report").parity
    assert parity.predicted_tokens_per_step == parity.measured_tokens_per_step
    assert parity.logits_difference is None


def test_a_head_without_a_record_is_refused(tiny_target: Target, features: str, tmp_path: Path) -> None:
    head = trained(tmp_path / "head", features=features, epochs=1, holdout=0)
    with pytest.raises(EagleError, match=r"has no draft/parity\.safetensors"):
        check(tiny_target, head, tmp_path / "report")


def test_prompts_and_parity_exclude_each_other() -> None:
    base = {"target": "t", "head": "h", "output": "o"}
    with pytest.raises(ValidationError, match="give either --prompts to answer, or --parity"):
        BenchConfig(**base)
    with pytest.raises(ValidationError, match="give either --prompts to answer, or --parity"):
        BenchConfig(**base, prompts=["builtin:eval"], parity=True)
    with pytest.raises(ValidationError, match="--trained-on is for --parity"):
        BenchConfig(**base, prompts=["builtin:eval"], trained_on="x")
