"""Claims about the stage as a whole, on a tiny target and conversations with hand-made masks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stages.artifacts import open_artifact
from stages.artifacts.folder import LocalFolder
from stages.extract_features import stage
from stages.extract_features.config import ExtractFeaturesConfig
from stages.extract_features.estimate import FeaturesEstimate
from stages.features import engine
from stages.features.config import FeatureSettings
from stages.features.extraction import plan_extraction
from stages.features.layout import read_target_weights
from stages.progress import Reporter
from stages.targets import load_target
from tests.extract_features.extracting import (
    CONTEXT,
    MASKS,
    QUIET,
    VOCAB,
    check_states,
    conversation,
    conversations,
    extract,
    manifest_of,
    refusal,
    rows_of,
    run,
)
from tests.tiny import make_tiny_target


def test_rows_hold_the_states_of_their_conversation_up_to_the_last_label(
    target: Path, source: str, tmp_path: Path
) -> None:
    result = extract(target, source, tmp_path / "f", forward_tokens=40, shard_bytes=20_000)
    rows = rows_of(tmp_path / "f")
    assert sorted(rows) == [0, 1, *range(3, len(MASKS))]
    assert rows[0].loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert rows[1].supervised.tolist() == [2, 7, 8]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for number, row in rows.items():
        ids = conversation(number, MASKS[number]).input_ids
        assert row.input_ids.tolist() == ids[: len(row.input_ids)]
        check_states(row, model, ids, (2, 4, 5))
    manifest = manifest_of(tmp_path / "f")
    assert manifest.counts == {
        "rows": len(rows),
        "tokens": sum(len(row.input_ids) for row in rows.values()),
        "supervised_tokens": sum(len(row.last) for row in rows.values()),
        "clipped_rows": 0,
        "dropped_rows": 0,
        "skipped_rows": 1,
        "left_out_rows": 0,
    }
    assert manifest.config["feature_layers"] == [2, 4, 5]
    assert sum(shard.rows for shard in manifest.shards) == result.rows == len(rows)
    assert result.shards == len(manifest.shards) > 2


def test_layers_of_ones_choice_are_taken_and_named(target: Path, source: str, tmp_path: Path) -> None:
    result = extract(target, source, tmp_path / "f", layers="1, 3,7", max_tokens=40)
    assert result.feature_layers == (1, 3, 7)
    assert manifest_of(tmp_path / "f").config["feature_layers"] == [1, 3, 7]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for number, row in rows_of(tmp_path / "f").items():
        check_states(row, model, conversation(number, MASKS[number]).input_ids, (1, 3, 7))


def test_a_target_too_shallow_for_the_default_can_have_layers_chosen(tmp_path: Path) -> None:
    shallow = make_tiny_target(tmp_path / "t", vocab=VOCAB, hidden=32, max_length=CONTEXT, layers=4)
    source = conversations(tmp_path / "c", shallow, MASKS[:2])
    message = refusal(shallow, source, tmp_path / "f")
    assert "4 layers needs at least 7, or three layers of your choice (--layers)" in message
    assert extract(shallow, source, tmp_path / "f", layers="1,2,3").feature_layers == (1, 2, 3)


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


def test_long_conversations_end_with_a_whole_answer_or_are_dropped_and_both_are_counted(
    target: Path, source: str, tmp_path: Path
) -> None:
    long = [number for number, mask in enumerate(MASKS) if len(mask) > 9]
    result = extract(target, source, tmp_path / "clip", max_length=9)
    rows = rows_of(tmp_path / "clip")
    assert rows[0].loss_mask.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert rows[1].loss_mask.tolist() == [0, 0, 1, 1], "its second answer does not fit"
    assert (result.clipped_rows, result.dropped_rows) == (len(long), 0)
    assert result.rows == len(MASKS) - 1

    result = extract(target, source, tmp_path / "drop", max_length=9, long_rows="drop")
    assert (result.clipped_rows, result.dropped_rows) == (0, len(long))
    assert sorted(rows_of(tmp_path / "drop")) == [n for n in range(len(MASKS)) if n not in (2, *long)]


def test_tokens_stop_before_the_conversation_that_does_not_fit(
    target: Path, source: str, tmp_path: Path
) -> None:
    result = extract(target, source, tmp_path / "f", max_tokens=40)
    kept = sorted(rows_of(tmp_path / "f"))
    assert kept == [n for n in range(kept[-1] + 1) if n != 2]
    assert result.tokens <= 40 < result.tokens + len(MASKS[kept[-1] + 1])
    assert result.left_out_rows == len(MASKS) - kept[-1] - 1


def test_conversations_in_another_number_format_will_do(target: Path, tmp_path: Path) -> None:
    source = conversations(tmp_path / "c", target, MASKS[:2], dtype="bfloat16")
    extract(target, source, tmp_path / "f", dtype="float32")
    manifest = manifest_of(tmp_path / "f")
    assert manifest.target is not None
    assert manifest.target.dtype == "float32"
    assert [parent.uri for parent in manifest.parents] == [source]


@pytest.mark.parametrize("storage", ["bfloat16", "float16", "fp8"])
def test_states_are_stored_in_the_format_asked_for_and_in_the_bytes_that_go_with_it(
    storage: str, tmp_path: Path
) -> None:
    wide = make_tiny_target(tmp_path / "t", vocab=VOCAB, hidden=256, layers=7, max_length=CONTEXT)
    source = conversations(tmp_path / "c", wide, ["000" + "1" * 40] * 12)
    for name in ("float32", storage):
        extract(wide, source, tmp_path / name, storage_dtype=name)
    exact, found = rows_of(tmp_path / "float32"), rows_of(tmp_path / storage)
    for number, row in found.items():
        assert row.aux.dtype == (torch.float16 if storage == "float16" else torch.bfloat16)
        bound = 0.04 if storage == "fp8" else 0.004
        for states, others in ((row.aux, exact[number].aux), (row.last, exact[number].last)):
            assert 0 < (states.float() - others).norm() / others.norm() < bound
        assert torch.equal(row.target_argmax, exact[number].target_argmax)
    manifest = manifest_of(tmp_path / storage)
    assert manifest.config["storage_dtype"] == storage
    tokens, supervised = manifest.counts["tokens"], manifest.counts["supervised_tokens"]
    in_16_bits = 1.02 * 2 * (3 * 256 * tokens + 256 * supervised)
    taken = sum(shard.bytes for shard in manifest.shards)
    assert taken <= in_16_bits * (0.53 if storage == "fp8" else 1)


@pytest.mark.parametrize(
    "settings", [{}, {"storage_dtype": "fp8", "forward_tokens": 40, "shard_bytes": 9_000}]
)
def test_an_estimate_is_what_a_run_then_writes_and_writes_nothing(
    target: Path, source: str, tmp_path: Path, settings: dict
) -> None:
    told = run(target, source, tmp_path / "f", estimate=True, max_length=9, **settings)
    assert isinstance(told, FeaturesEstimate)
    assert not (tmp_path / "f").exists()
    made = extract(target, source, tmp_path / "f", max_length=9, **settings)
    assert told.features_bytes == made.bytes
    files = [path for path in (tmp_path / "f").rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert told.bytes == sum(path.stat().st_size for path in files)
    assert told.bytes_per_token == made.bytes / made.tokens
    shared = {
        "rows",
        "tokens",
        "supervised_tokens",
        "clipped_rows",
        "skipped_rows",
        "shards",
        "storage_dtype",
    }
    assert told.model_dump(include=shared) == made.model_dump(include=shared)
    assert told.free_bytes is not None
    assert told.tokens_per_s > 0
    assert told.seconds == pytest.approx(told.tokens / told.tokens_per_s)


def test_an_estimate_needs_no_output(target: Path, source: str) -> None:
    fields = {"target": str(target), "conversations": source, "dtype": "float32"}
    told = stage.run(ExtractFeaturesConfig(**fields, estimate=True), QUIET)
    assert isinstance(told, FeaturesEstimate)
    assert told.free_bytes is None
    with pytest.raises(ValidationError, match="--output is missing"):
        ExtractFeaturesConfig(**fields)


def test_the_size_is_announced(
    target: Path, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ExtractFeaturesConfig(target=str(target), conversations=source, output=str(tmp_path / "f"))
    result = stage.run(config, Reporter())
    assert isinstance(result, stage.ExtractFeaturesResult)
    line = next(line for line in capsys.readouterr().err.splitlines() if "bytes a token" in line)
    assert f"{result.rows} rows, {result.tokens} tokens, {result.supervised_tokens} supervised" in line
    assert f"{result.bytes / result.tokens:,.0f} bytes a token" in line


def test_features_are_the_same_on_an_object_store(target: Path, source: str, tmp_path: Path) -> None:
    extract(target, source, tmp_path / "f")
    extract(target, source, "memory://extract-features/f")
    assert manifest_of("memory://extract-features/f").digest == manifest_of(tmp_path / "f").digest


def test_the_target_goes_on_while_a_shard_is_written(
    target: Path, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, waited = threading.Event(), []
    states, write = engine.target_states, LocalFolder.write
    passes = 0

    def counting(*args: object) -> object:
        nonlocal passes
        passes += 1
        if passes == 2:
            ran.set()
        return states(*args)  # type: ignore[arg-type]

    def waiting(self: LocalFolder, name: str, data: bytes) -> None:
        if name.startswith("features-00000"):  # of the first pass
            waited.append(ran.wait(20))
        write(self, name, data)

    monkeypatch.setattr(engine, "target_states", counting)
    monkeypatch.setattr(LocalFolder, "write", waiting)
    extract(target, source, tmp_path / "f", forward_tokens=40, shard_bytes=6_000)
    assert waited == [True]


def test_a_shard_made_by_number_is_the_shard_that_was_written(
    target: Path, source: str, tmp_path: Path
) -> None:
    settings = {"forward_tokens": 40, "shard_bytes": 6_000, "storage_dtype": "fp8"}
    extract(target, source, tmp_path / "f", **settings)
    artifact = open_artifact(str(tmp_path / "f"), "features")
    loaded = load_target(str(target), "cpu", "float32", decodes=False)
    conversed = open_artifact(source, "conversations")
    extraction = plan_extraction(FeatureSettings(**settings), loaded, conversed)
    assert artifact.manifest.config == extraction.settings | {"engine": "transformers"}
    assert [sizes.bytes for sizes in extraction.sizes] == [shard.bytes for shard in artifact.manifest.shards]
    with extraction.running() as extractor:
        for number in (3, 0, 2):
            shard = extractor.shard(number)
            assert shard.to_bytes() == artifact.read(artifact.manifest.shards[number].path)
            assert extraction.row_ids(number) == shard.row_ids.tolist()
