"""Claims about the stage as a whole, on a tiny target and conversations with hand-made masks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from stages.artifacts import ArtifactWriter, Manifest, artifact_state, open_artifact
from stages.artifacts.conversations import Conversation, shard_name, write_conversations
from stages.artifacts.folder import LocalFolder
from stages.errors import EagleError
from stages.extract_features import stage
from stages.extract_features.config import ExtractFeaturesConfig
from stages.extract_features.estimate import FeaturesEstimate
from stages.features import engine
from stages.features.config import FeatureSettings
from stages.features.extraction import plan_extraction
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
    result = run(target, source, output, **settings)
    assert isinstance(result, stage.ExtractFeaturesResult)
    return result


def run(
    target: Path, source: str, output: Path | str, **settings: object
) -> stage.ExtractFeaturesResult | FeaturesEstimate:
    fields = {"target": str(target), "conversations": source, "output": str(output), "dtype": "float32"}
    return stage.run(ExtractFeaturesConfig(**(fields | settings)), QUIET)  # type: ignore[arg-type]


def manifest_of(output: Path | str) -> Manifest:
    return open_artifact(str(output), "features").manifest


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


def check_states(row: FeatureRow, model: torch.nn.Module, ids: list[int], layers: tuple[int, ...]) -> None:
    with torch.no_grad():
        shown = model(torch.tensor([ids]), output_hidden_states=True)
    aux = torch.cat([shown.hidden_states[layer][0] for layer in layers], dim=-1)
    torch.testing.assert_close(row.aux, aux[: len(row.aux)], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row.last, shown.hidden_states[-1][0, row.supervised], rtol=1e-5, atol=1e-5)
    assert row.target_argmax.tolist() == shown.logits[0, row.supervised].argmax(-1).tolist()


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
    settings = {"forward_tokens": 40, "shard_bytes": 6_000, "dtype": "float32", "device": "cpu"}
    names = {"target": str(target), "conversations": source, "output": str(tmp_path / "killed")}
    command = [sys.executable, "-c", KILLED_RUN, json.dumps(settings | names)]
    # With as many threads as the runs below: another number may add up in another order.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
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
    committed = sorted(before.items())[:-1]  # the last one may have been written and not yet recorded
    assert set(committed) < set(after.items())


def test_a_complete_artifact_is_left_alone(target: Path, source: str, tmp_path: Path) -> None:
    first = extract(target, source, tmp_path / "f")
    changed = (tmp_path / "f" / "manifest.json").stat().st_mtime_ns
    again = extract(target, source, tmp_path / "f")
    assert (tmp_path / "f" / "manifest.json").stat().st_mtime_ns == changed
    assert again.model_copy(update={"seconds": first.seconds}) == first
    assert "already complete" in again.summary()


def test_parts_of_a_job_array_become_the_whole_without_the_target(
    target: Path, source: str, tmp_path: Path
) -> None:
    settings = {"forward_tokens": 40, "shard_bytes": 6_000}
    parts = [
        extract(target, source, tmp_path / "f", shard_index=index, num_shards=3, **settings)
        for index in (2, 0, 1)
    ]
    assert [(tmp_path / "f" / f"part-0000{n}-of-00003" / "target").exists() for n in range(3)] == [1, 0, 0]
    joined = extract(Path("not-there"), source, tmp_path / "f", num_shards=3, **settings)
    whole = extract(target, source, tmp_path / "whole", **settings)
    assert joined.model_dump(exclude={"output", "shards", "bytes", "seconds"}) == whole.model_dump(
        exclude={"output", "shards", "bytes", "seconds"}
    )
    assert joined.shards == sum(part.shards for part in parts)
    assert manifest_of(tmp_path / "f").config == manifest_of(tmp_path / "whole").config
    made, expected = rows_of(tmp_path / "f"), rows_of(tmp_path / "whole")
    assert made.keys() == expected.keys()
    for number, row in made.items():
        assert row.input_ids.tolist() == expected[number].input_ids.tolist()
        torch.testing.assert_close(row.aux, expected[number].aux, rtol=1e-5, atol=1e-5)
    weights = read_target_weights(open_artifact(str(tmp_path / "f"), "features"))
    assert weights["norm.weight"].shape == (32,)
    again = extract(Path("not-there"), source, tmp_path / "f", num_shards=3, **settings)
    assert again.rows == joined.rows


def test_tokens_are_shared_out_over_a_job_array(target: Path, source: str, tmp_path: Path) -> None:
    settings = {"max_tokens": 60, "num_shards": 2}
    taken = [extract(target, source, tmp_path / "f", shard_index=n, **settings).tokens for n in range(2)]
    assert max(taken) <= 30 < 2 * min(taken)
    joined = extract(target, source, tmp_path / "f", **settings)
    assert joined.tokens + joined.left_out_rows > sum(taken) == joined.tokens


def test_parts_that_are_missing_or_were_made_otherwise_are_named(
    target: Path, source: str, tmp_path: Path
) -> None:
    assert "none of the 2 parts" in refusal(target, source, tmp_path / "f", num_shards=2)
    extract(target, source, tmp_path / "f", shard_index=1, num_shards=2)
    assert "--shard-index 0" in refusal(target, source, tmp_path / "f", num_shards=2)
    extract(target, source, tmp_path / "f", shard_index=0, num_shards=2)
    message = refusal(target, source, tmp_path / "f", num_shards=2, max_length=20)
    assert f"were made with --max-length {CONTEXT}, not 20" in message
    message = refusal(target, source, tmp_path / "f", num_shards=2, layers="1,2,3")
    assert "were made with --layers 2,4,5, not 1,2,3" in message
    other = conversations(tmp_path / "c", target, MASKS[:5])
    assert "other" in refusal(target, other, tmp_path / "f", num_shards=2)
    assert extract(target, source, tmp_path / "f", num_shards=2).rows == len(MASKS) - 1


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
