"""What cannot be extracted is refused in one line, before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from stages.artifacts import ArtifactWriter
from stages.artifacts.conversations import shard_name, write_conversations
from stages.extract_features import stage
from stages.extract_features.config import ExtractFeaturesConfig
from stages.features.config import FeatureSettings
from stages.targets import load_target
from tests.extract_features.extracting import (
    CONTEXT,
    MASKS,
    VOCAB,
    conversation,
    conversations,
    extract,
    refusal,
)
from tests.tiny import make_tiny_target


def test_another_target_is_refused(source: str, tmp_path: Path) -> None:
    other = make_tiny_target(tmp_path / "t", seed=1, vocab=VOCAB, hidden=32, max_length=CONTEXT)
    message = refusal(other, source, tmp_path / "f")
    assert "differs in weights" in message
    assert not (tmp_path / "f").exists()


def test_another_chat_template_is_refused(source: str, tmp_path: Path) -> None:
    other = make_tiny_target(
        tmp_path / "t", vocab=VOCAB, hidden=32, max_length=CONTEXT, chat_template="{{ messages }}"
    )
    assert "differs in chat_template" in refusal(other, source, tmp_path / "f")


def test_conversations_with_nothing_to_learn_are_an_error(target: Path, tmp_path: Path) -> None:
    source = conversations(tmp_path / "c", target, ["0010", "001"])
    message = refusal(target, source, tmp_path / "f")
    assert message.startswith("none of the 2 conversations")
    assert not (tmp_path / "f").exists()


def test_an_artifact_without_conversations_is_an_error(target: Path, tmp_path: Path) -> None:
    source = conversations(tmp_path / "c", target, [])
    assert "has no conversations: make them again with eagle gen-data" in refusal(
        target, source, tmp_path / "f"
    )


@pytest.mark.parametrize("wrong", [VOCAB, -1])
def test_a_token_that_the_target_has_not_is_named(target: Path, tmp_path: Path, wrong: int) -> None:
    fingerprint = load_target(str(target), device="cpu", dtype="float32").fingerprint
    rows = [conversation(number, "0011") for number in range(3)]
    rows[1].input_ids[2] = wrong
    with ArtifactWriter.open(str(tmp_path / "c"), "conversations", {}, target=fingerprint) as writer:
        writer.add_shard(shard_name(0), write_conversations(rows), rows=3)
        writer.finish({"rows": 3})
    message = refusal(target, str(tmp_path / "c"), tmp_path / "f")
    assert f"conversation 1 in {tmp_path / 'c'} has the token id {wrong}, and {target} has {VOCAB}" in message


def test_a_length_beyond_the_context_is_refused(target: Path, source: str, tmp_path: Path) -> None:
    message = refusal(target, source, tmp_path / "f", max_length=CONTEXT + 1)
    assert f"--max-length {CONTEXT + 1} is more than the target's context of {CONTEXT}" in message


@pytest.mark.parametrize("layers", ["0,3,5", "2,3,8"])
def test_layers_that_the_target_has_not_are_refused(
    target: Path, source: str, tmp_path: Path, layers: str
) -> None:
    message = refusal(target, source, tmp_path / "f", layers=layers)
    wrong = "0" if layers.startswith("0") else "8"
    assert f"--layers {layers}: {wrong} is not between 1 and 7" in message
    assert "the state entering layer l of the target's 8" in message


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ("2,15", "give three layer numbers with commas between"),
        ("2 15 27", "give three layer numbers"),
        ("a,b,c", "give three layer numbers"),
        ("2,2,5", "distinct and ascending"),
        ("5,4,2", "distinct and ascending"),
    ],
)
def test_layers_are_three_distinct_ascending_numbers(layers: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        FeatureSettings(layers=layers)


def test_features_as_input_are_refused(target: Path, source: str, tmp_path: Path) -> None:
    extract(target, source, tmp_path / "f")
    message = refusal(target, str(tmp_path / "f"), tmp_path / "g")
    assert "is a features artifact where conversations is needed" in message


def test_conversations_that_have_changed_are_refused_unless_nobody_looks(
    target: Path, tmp_path: Path
) -> None:
    source = conversations(tmp_path / "c", target, MASKS[:3])
    (shard,) = (tmp_path / "c").glob("*.parquet")
    shard.write_bytes(shard.read_bytes().replace(b"parquet-cpp-arrow", b"parquet-cpp-arroW"))
    assert "does not match its digest" in refusal(target, source, tmp_path / "f")
    assert extract(target, source, tmp_path / "f", verify="off").rows == 2


def test_a_disk_with_too_little_room_is_refused_before_anything_runs(
    target: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "free_bytes", lambda uri: 1000)
    message = refusal(target, source, tmp_path / "f")
    assert "free: make room" in message
    assert not (tmp_path / "f").exists()


def test_flags_that_do_not_go_together_are_refused() -> None:
    fields = {"target": "t", "conversations": "c", "output": "o"}
    for wrong, reason in (
        ({"device_map": "auto", "device": "cpu"}, "leave out --device cpu"),
        ({"device_map": "auto", "engine": "vllm"}, "vllm has --tensor-parallel-size"),
        ({"tensor_parallel_size": 2}, "transformers has --device-map"),
    ):
        with pytest.raises(ValidationError, match=reason):
            ExtractFeaturesConfig(**fields, **wrong)  # type: ignore[arg-type]
