"""Claims about the stage as a whole, on a tiny target and conversations with hand-made masks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stages.artifacts.conversations import Conversation, shard_name, write_conversations
from stages.artifacts.manifest import Manifest
from stages.artifacts.store import ArtifactWriter, artifact_state, open_artifact
from stages.errors import EagleError
from stages.extract_features import stage
from stages.extract_features.config import ExtractFeaturesConfig
from stages.features.layout import FeatureRow, read_feature_shards, read_target_weights
from stages.progress import Reporter
from stages.targets import load_target
from tests.tiny import make_tiny_target

QUIET = Reporter(quiet=True)
VOCAB, CONTEXT = 300, 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"), vocab=VOCAB, hidden=32, max_length=CONTEXT)


def conversation(number: int, mask: str) -> Conversation:
    rng = random.Random(number)
    return Conversation(
        id=str(number),
        source="test",
        license="",
        category="",
        messages=[],
        input_ids=[rng.randrange(VOCAB) for _ in mask],
        loss_mask=[int(c) for c in mask],
        finish_reason="stop",
    )


def conversations(uri: Path | str, target: Path, masks: list[str], dtype: str = "float32") -> str:
    fingerprint = load_target(str(target), device="cpu", dtype=dtype).fingerprint
    rows = [conversation(number, mask) for number, mask in enumerate(masks)]
    with ArtifactWriter.open(str(uri), "conversations", {}, target=fingerprint) as writer:
        for shard, start in enumerate(range(0, len(rows), 7)):
            part = rows[start : start + 7]
            writer.add_shard(shard_name(shard), write_conversations(part), rows=len(part))
        writer.finish({"rows": len(rows)})
    return str(uri)


def extract(target: Path, source: str, output: Path | str, **settings: object) -> stage.ExtractFeaturesResult:
    fields = {"target": str(target), "conversations": source, "output": str(output), "dtype": "float32"}
    return stage.run(ExtractFeaturesConfig(**(fields | settings)), QUIET)  # type: ignore[arg-type]


def rows_of(output: Path | str) -> dict[int, FeatureRow]:
    shards = list(read_feature_shards(open_artifact(str(output), "features")))
    return {row.row_id: row for shard in shards for row in shard.rows()}


MASKS = [
    "0001111100",  # answer and trailing glue
    "00110001110000",  # two turns
    "0010",  # an answer of one token: nothing to learn
    *("0" * (3 + n % 5) + "1" * (2 + n % 11) for n in range(20)),
]


@pytest.fixture(scope="module")
def source(target: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return conversations(tmp_path_factory.mktemp("source") / "conversations", target, MASKS)


def test_rows_hold_the_states_of_their_conversation_up_to_the_last_label(
    target: Path, source: str, tmp_path: Path
) -> None:
    result = extract(target, source, tmp_path / "f", batch_tokens=40, shard_bytes=20_000)
    rows = rows_of(tmp_path / "f")
    assert sorted(rows) == [0, 1, *range(3, len(MASKS))]
    assert rows[0].loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert rows[1].supervised.tolist() == [2, 7, 8]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for number, row in rows.items():
        ids = conversation(number, MASKS[number]).input_ids
        assert row.input_ids.tolist() == ids[: len(row.input_ids)]
        with torch.no_grad():
            shown = model(torch.tensor([ids]), output_hidden_states=True)
        aux = torch.cat([shown.hidden_states[layer][0] for layer in (2, 4, 5)], dim=-1)
        torch.testing.assert_close(row.aux, aux[: len(row.aux)], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(row.last, shown.hidden_states[-1][0, row.supervised], rtol=1e-5, atol=1e-5)
        assert row.target_argmax.tolist() == shown.logits[0, row.supervised].argmax(-1).tolist()
    manifest = open_artifact(str(tmp_path / "f"), "features").manifest
    assert manifest.counts == {
        "rows": len(rows),
        "tokens": sum(len(row.input_ids) for row in rows.values()),
        "supervised_tokens": sum(len(row.last) for row in rows.values()),
        "skipped_rows": 1,
        "clipped_rows": 0,
    }
    assert manifest.config["feature_layers"] == [2, 4, 5]
    assert sum(shard.rows for shard in manifest.shards) == result.rows == len(rows)
    assert result.shards == len(manifest.shards) > 2


def test_training_finds_the_target_beside_the_features(target: Path, source: str, tmp_path: Path) -> None:
    extract(target, source, tmp_path / "f", dtype="bfloat16")
    folder = tmp_path / "f" / "target"
    theirs = AutoConfig.from_pretrained(target)
    assert AutoConfig.from_pretrained(folder).num_hidden_layers == theirs.num_hidden_layers
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(target).chat_template
    assert (folder / "generation_config.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    weights = read_target_weights(open_artifact(str(tmp_path / "f"), "features"))
    assert weights.keys() == {"embed_tokens.weight", "lm_head.weight", "norm.weight"}
    assert torch.equal(weights["embed_tokens.weight"], model.model.embed_tokens.weight)
    assert torch.equal(weights["lm_head.weight"], model.lm_head.weight)
    assert torch.equal(weights["norm.weight"], model.model.norm.weight)


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    tied = make_tiny_target(tmp_path / "t", vocab=VOCAB, hidden=32, max_length=CONTEXT, tied=True)
    extract(tied, conversations(tmp_path / "c", tied, MASKS[:2]), tmp_path / "f")
    stored = safetensors.torch.load_file(tmp_path / "f" / "target" / "weights.safetensors")
    assert stored.keys() == {"embed_tokens.weight", "norm.weight"}
    weights = read_target_weights(open_artifact(str(tmp_path / "f"), "features"))
    assert torch.equal(weights["lm_head.weight"], stored["embed_tokens.weight"])


def test_long_conversations_are_cut_and_counted(target: Path, source: str, tmp_path: Path) -> None:
    result = extract(target, source, tmp_path / "f", max_length=6)
    rows = rows_of(tmp_path / "f")
    assert max(len(row.input_ids) for row in rows.values()) == 6
    assert rows[1].loss_mask.tolist() == [
        0,
        0,
        1,
        1,
    ]  # cut in its second turn: ends at the first turn's label
    assert result.clipped_rows == sum(len(MASKS[number]) > 6 for number in rows)


def test_conversations_in_another_number_format_will_do(target: Path, tmp_path: Path) -> None:
    source = conversations(tmp_path / "c", target, MASKS[:2], dtype="bfloat16")
    extract(target, source, tmp_path / "f", dtype="float32")
    manifest = open_artifact(str(tmp_path / "f"), "features").manifest
    assert manifest.target is not None
    assert manifest.target.dtype == "float32"
    assert [parent.uri for parent in manifest.parents] == [source]


def test_the_shards_take_the_bytes_that_were_announced(
    target: Path, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ExtractFeaturesConfig(target=str(target), conversations=source, output=str(tmp_path / "f"))
    result = stage.run(config, Reporter())
    line = next(line for line in capsys.readouterr().err.splitlines() if "bytes a token" in line)
    assert f"{result.rows} rows, {result.tokens} tokens, {result.supervised_tokens} supervised" in line
    announced = result.tokens * (5 + 3 * 32 * 2) + result.supervised_tokens * (4 + 32 * 2) + result.rows * 16
    assert f"{announced / result.tokens:,.0f} bytes a token" in line
    assert 0 <= result.bytes - announced < 1024 * result.shards


def test_features_are_the_same_on_an_object_store(target: Path, source: str, tmp_path: Path) -> None:
    extract(target, source, tmp_path / "f")
    extract(target, source, "memory://extract-features/f")
    local, remote = (
        open_artifact(uri, "features") for uri in (str(tmp_path / "f"), "memory://extract-features/f")
    )
    assert remote.manifest.digest == local.manifest.digest


KILLED_RUN = """
import json, os, signal, sys
from stages.extract_features import stage
from stages.extract_features.config import ExtractFeaturesConfig
from stages.progress import Reporter, Task

advance = Task.advance
def killing(self, count=1):
    advance(self, count)
    if self.done > self.total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

Task.advance = killing
stage.run(ExtractFeaturesConfig(**json.loads(sys.argv[1])), Reporter(quiet=True))
"""


def test_a_killed_run_continues_to_what_an_uninterrupted_one_makes(
    target: Path, source: str, tmp_path: Path
) -> None:
    settings = {"batch_tokens": 40, "shard_bytes": 20_000, "dtype": "float32", "device": "cpu"}
    names = {"target": str(target), "conversations": source, "output": str(tmp_path / "killed")}
    command = [sys.executable, "-c", KILLED_RUN, json.dumps(settings | names)]
    killed = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert artifact_state(str(tmp_path / "killed")) == "partial"
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("features-*")}
    assert before

    extract(target, source, tmp_path / "killed", **settings)
    extract(target, source, tmp_path / "whole", **settings)
    resumed, whole = (manifest_of(tmp_path / name) for name in ("killed", "whole"))
    assert resumed.shards == whole.shards
    assert resumed.digest == whole.digest
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("features-*")}
    assert before.items() < after.items()


def manifest_of(output: Path) -> Manifest:
    return open_artifact(str(output), "features").manifest


def test_a_complete_artifact_is_left_alone(target: Path, source: str, tmp_path: Path) -> None:
    first = extract(target, source, tmp_path / "f")
    changed = (tmp_path / "f" / "manifest.json").stat().st_mtime_ns
    again = extract(target, source, tmp_path / "f")
    assert (tmp_path / "f" / "manifest.json").stat().st_mtime_ns == changed
    assert again.model_copy(update={"seconds": first.seconds}) == first
    assert "already complete" in again.summary()


def refusal(target: Path, source: str, output: Path | str, **settings: object) -> str:
    with pytest.raises(EagleError) as error:
        extract(target, source, output, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


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


def test_a_length_beyond_the_context_is_refused(target: Path, source: str, tmp_path: Path) -> None:
    message = refusal(target, source, tmp_path / "f", max_length=CONTEXT + 1)
    assert f"--max-length {CONTEXT + 1} is more than the target's context of {CONTEXT}" in message


def test_features_as_input_are_refused(target: Path, source: str, tmp_path: Path) -> None:
    extract(target, source, tmp_path / "f")
    message = refusal(target, str(tmp_path / "f"), tmp_path / "g")
    assert "is a features artifact where conversations is needed" in message


def test_a_disk_with_too_little_room_is_refused_before_anything_runs(
    target: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", ["free"])
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda path: usage(free=1000))
    message = refusal(target, source, tmp_path / "f")
    assert "free: make room" in message
    assert not (tmp_path / "f").exists()
