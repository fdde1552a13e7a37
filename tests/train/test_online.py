"""Training on features that the target computes on the fly, against the same features extracted before."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stages.artifacts import ArtifactWriter, artifact_state, open_artifact
from stages.artifacts.conversations import Conversation, shard_name, write_conversations
from stages.errors import EagleError
from stages.extract_features import stage as extraction
from stages.extract_features.config import ExtractFeaturesConfig
from stages.features.online import OnlineFeatures
from stages.features.source import OfflineFeatures
from stages.heads import load_head
from stages.progress import Reporter, Task
from stages.targets import load_target
from stages.train.config import TrainConfig
from stages.train.stage import TrainResult, run
from stages.train.training import Training
from tests.tiny import make_tiny_target

QUIET = Reporter(quiet=True)
VOCAB = 300
SHAPE = {"forward_tokens": 60, "shard_bytes": 12_000, "max_length": 40}
"""Several batches a shard, several shards, and rows that are cut."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_target(tmp_path_factory.mktemp("target"), vocab=VOCAB, hidden=32, max_length=64))


@pytest.fixture(scope="module")
def conversations(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("online") / "conversations")
    rng = random.Random(0)
    masks = ["0010", *("0" * (2 + n % 9) + "1" * (3 + 5 * n % 41) for n in range(20)), "0011100111"]
    rows = [
        Conversation(
            id=str(number),
            source="test",
            license="",
            category="",
            messages=[],
            input_ids=[rng.randrange(60) for _ in mask],
            loss_mask=[int(bit) for bit in mask],
            finish_reason="stop",
        )
        for number, mask in enumerate(masks)
    ]
    fingerprint = load_target(target, device="cpu", dtype="float32").fingerprint
    with ArtifactWriter.open(uri, "conversations", {}, target=fingerprint) as writer:
        for shard, start in enumerate(range(0, len(rows), 9)):
            part = rows[start : start + 9]
            writer.add_shard(shard_name(shard), write_conversations(part), rows=len(part))
        writer.finish({"rows": len(rows)})
    return uri


def extract(target: str, conversations: str, output: Path, **settings: object) -> str:
    fields = {"target": target, "conversations": conversations, "output": str(output), "device": "cpu"}
    extraction.run(ExtractFeaturesConfig.model_validate(fields | SHAPE | settings), QUIET)
    return str(output)


def make_config(output: Path, **settings: object) -> TrainConfig:
    defaults = {
        "output": str(output),
        "device": "cpu",
        "batch_tokens": 64,
        "epochs": 2,
        "ttt_steps": 2,
        "lr": 3e-3,
        "holdout": 0.1,
        "window_bytes": 40_000,
        "parity_rows": 0,
    }
    return TrainConfig.model_validate(defaults | settings)


def online(target: str, conversations: str, output: Path, **settings: object) -> TrainConfig:
    return make_config(output, target=target, conversations=conversations, **(SHAPE | settings))


def measures(result: TrainResult) -> dict[str, object]:
    return result.model_dump(exclude={"output", "seconds", "waiting"})


@pytest.mark.parametrize(
    ("dtype", "target_dtype", "settings"),
    [
        ("float32", "float32", {}),
        ("bfloat16", "bfloat16", {}),
        ("bfloat16", "float32", {"storage_dtype": "float16", "layers": "1,3,6"}),
        ("float32", "bfloat16", {"storage_dtype": "fp8", "long_rows": "drop"}),
    ],
)
def test_a_head_is_the_same_byte_for_byte_online_and_offline(
    target: str, conversations: str, tmp_path: Path, dtype: str, target_dtype: str, settings: dict[str, str]
):
    features = extract(target, conversations, tmp_path / "features", dtype=target_dtype, **settings)
    assert len(open_artifact(features, "features").manifest.shards) > 2
    # The features say where the target is, whose last layer one of the heads starts from and is tried with.
    training: dict[str, object] = {"dtype": dtype}
    if not settings:
        training |= {"init": "layer", "parity_rows": 4} if dtype == "float32" else {"init": "target"}
    before = run(make_config(tmp_path / "offline", features=features, **training), QUIET)
    settings = settings | {"target_dtype": target_dtype}
    on_the_fly = run(online(target, conversations, tmp_path / "online", **training, **settings), QUIET)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "online" / name).read_bytes() == (tmp_path / "offline" / name).read_bytes()
    assert measures(on_the_fly) == measures(before)
    assert (before.parity is not None) == ("parity_rows" in training)
    head = open_artifact(str(tmp_path / "online"), "head")
    layers = load_head(head, dtype=torch.float32, device="cpu").config.feature_layers
    assert layers == ((1, 3, 6) if "layers" in settings else None)


def test_the_head_says_what_it_was_made_from(target: str, conversations: str, tmp_path: Path):
    features = extract(target, conversations, tmp_path / "features", dtype="float32")
    run(online(target, conversations, tmp_path / "head", target_dtype="float32", max_steps=1), QUIET)
    head = open_artifact(str(tmp_path / "head"), "head").manifest
    extracted = open_artifact(features, "features").manifest
    assert head.parents == (open_artifact(conversations, "conversations").parent(),)
    assert head.target == extracted.target == load_target(target, "cpu", "float32").fingerprint
    assert head.config["online"] | {"engine": "transformers"} == extracted.config
    run(make_config(tmp_path / "other", features=features, max_steps=1), QUIET)
    assert "online" not in open_artifact(str(tmp_path / "other"), "head").manifest.config


@pytest.fixture
def sources(target: str, conversations: str, tmp_path: Path) -> tuple[OfflineFeatures, OnlineFeatures]:
    features = extract(target, conversations, tmp_path / "features")
    config = online(target, conversations, tmp_path / "head")
    return (
        OfflineFeatures(open_artifact(features, "features")),
        OnlineFeatures(
            open_artifact(conversations, "conversations"), load_target(target, "cpu", "auto"), config, QUIET
        ),
    )


def test_each_shard_is_the_one_that_extraction_writes(sources: tuple[OfflineFeatures, OnlineFeatures]):
    offline, online = sources
    assert len(offline.shards) == len(online.shards) > 3
    for number in reversed(range(len(offline.shards))):
        written, computed = offline.shards[number], online.shards[number]
        assert computed.rows == written.rows
        assert computed.labels.equal(written.labels)
        assert computed.bytes == written.bytes
        with offline.open(number) as expected, online.open(number) as rows:
            for row, other in zip(rows, expected, strict=True):
                assert row.row_id == other.row_id
                for tensor in ("input_ids", "loss_mask", "aux", "last", "target_argmax"):
                    assert getattr(row, tensor).equal(getattr(other, tensor))
    assert online.target_config == offline.target_config
    assert online.target_weights().keys() == offline.target_weights().keys()
    for name, weight in online.target_weights().items():
        assert weight.equal(offline.target_weights()[name])


class Held(Reporter):
    """Stops whoever reports progress, until it is let go."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.reached, self.go = threading.Event(), threading.Event()
        self.advanced = 0

    @contextmanager
    def task(self, *args: object, **kwargs: object) -> Iterator[Task]:
        def show(task: Task) -> None:
            self.advanced += 1
            self.reached.set()
            assert self.go.wait(20)

        yield Task("", None, "", 0, "", show)


def test_closing_ends_a_shard_that_another_thread_computes(target: str, conversations: str, tmp_path: Path):
    config = online(target, conversations, tmp_path / "head", shard_bytes=1 << 20)
    loaded, report = load_target(target, "cpu", "auto"), Held()
    features = OnlineFeatures(open_artifact(conversations, "conversations"), loaded, config, report)
    assert len(features.shards) == 1
    failed: list[BaseException] = []

    def open_it() -> None:
        try:
            with features.open(0):
                pass
        except RuntimeError as error:
            failed.append(error)

    opening = threading.Thread(target=open_it)
    opening.start()
    assert report.reached.wait(20)
    closing = threading.Thread(target=features.close)
    closing.start()
    while not features._closed:
        time.sleep(0.01)
    report.go.set()
    closing.join(20)
    opening.join(20)
    assert failed
    assert report.advanced == 1
    assert not any(layer._forward_pre_hooks for layer in loaded.decoder.layers)


def test_a_run_that_was_killed_ends_in_the_same_weights(
    target: str, conversations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = {"eval_every": 6, "checkpoint_seconds": 0}
    whole = run(online(target, conversations, tmp_path / "whole", **settings), QUIET)
    assert whole.steps > 9
    take_step = Training.step

    def killed_at_step_8(training: Training, batch: object, number: int) -> object:
        if number == 8:
            raise KeyboardInterrupt
        return take_step(training, batch, number)

    monkeypatch.setattr(Training, "step", killed_at_step_8)
    with pytest.raises(KeyboardInterrupt):
        run(online(target, conversations, tmp_path / "killed", **settings), QUIET)
    assert artifact_state(str(tmp_path / "killed")) == "partial"
    monkeypatch.undo()
    taken: list[int] = []

    def counting(training: Training, batch: object, number: int) -> object:
        taken.append(number)
        return take_step(training, batch, number)

    monkeypatch.setattr(Training, "step", counting)
    result = run(online(target, conversations, tmp_path / "killed", **settings), QUIET)
    assert taken == [*range(6, whole.steps)]
    weights = [tmp_path / name / "model.safetensors" for name in ("killed", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert measures(result) == measures(whole)


def test_conversations_of_another_target_are_refused(conversations: str, tmp_path: Path):
    other = make_tiny_target(tmp_path / "target", seed=1, vocab=VOCAB, hidden=32, max_length=64)
    with pytest.raises(EagleError, match="differs in weights"):
        run(online(str(other), conversations, tmp_path / "head"), QUIET)
    assert artifact_state(str(tmp_path / "head")) == "missing"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "give --features, or --conversations"),
        ({"conversations": "c"}, "give --features, or --conversations"),
        ({"features": "f", "conversations": "c", "target": "t"}, "--conversations is for"),
        ({"features": "f", "max_length": 9}, "--max-length is for"),
    ],
)
def test_there_is_one_source_of_features(settings: dict[str, object], complaint: str, tmp_path: Path):
    with pytest.raises(ValueError, match=complaint):
        make_config(tmp_path / "head", **settings)


class Recorder(Reporter):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)


def test_a_head_starts_from_the_targets_last_layer_where_the_target_is_at_hand(
    target: str, conversations: str, tmp_path: Path
):
    def first_weights(name: str, **settings: object) -> bytes:
        config = make_config(tmp_path / name, conversations=conversations, target=target, **settings)
        run(config.model_copy(update={"max_steps": 1}), QUIET)
        return (tmp_path / name / "model.safetensors").read_bytes()

    auto = first_weights("auto", init="auto")
    assert auto == first_weights("layer", init="layer")
    assert auto != first_weights("random", init="random")


def test_a_head_of_a_shape_of_its_own_starts_from_random_numbers(
    target: str, conversations: str, tmp_path: Path
):
    report = Recorder()
    run(make_config(tmp_path / "head", conversations=conversations, target=target, head_dim=6), report)
    assert any("starts from random numbers" in line and "shape" in line for line in report.lines)
