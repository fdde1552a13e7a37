"""Hidden states of other tools become the features that our own extraction makes of the same rows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts import ArtifactWriter, Manifest, artifact_state, open_artifact
from stages.artifacts.conversations import Conversation, shard_name, write_conversations
from stages.convert import stage
from stages.convert.config import ConvertConfig
from stages.convert.features import without_glue
from stages.errors import EagleError
from stages.extract_features import stage as extraction
from stages.extract_features.config import ExtractFeaturesConfig
from stages.features.layout import FeatureRow, read_feature_shards
from stages.progress import Reporter
from stages.targets import Target, load_target
from tests.convert.foreign import (
    Chat,
    chat,
    saved,
    write_specforge,
    write_speculators,
    write_speculators_pickles,
)
from tests.tiny import make_tiny_target

QUIET = Reporter(quiet=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_target(tmp_path_factory.mktemp("target"), vocab=300, hidden=32, max_length=64))


@pytest.fixture(scope="module")
def target(path: str) -> Target:
    return load_target(path, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def chats(target: Target) -> list[Chat]:
    shapes = [[(4, 5)], [(3, 2), (2, 6)], [(5, 1)], [(2, 9), (1, 1), (3, 4)], [(6, 3)], [(1, 12)]]
    many = [chat(shape, target, seed) for seed, shape in enumerate(shapes * 2)]
    return [*many, chat([(4, 8)], target, 100, finished=False)]


@pytest.fixture(scope="module")
def extracted(target: Target, path: str, chats: list[Chat], tmp_path_factory: pytest.TempPathFactory) -> str:
    """What our own stages make of the rows."""
    folder = tmp_path_factory.mktemp("ours")
    rows = [
        Conversation(str(n), "test", "", "", [], each.input_ids, each.loss_mask, "stop")
        for n, each in enumerate(chats)
    ]
    source = str(folder / "conversations")
    with ArtifactWriter.open(source, "conversations", {}, target=target.fingerprint) as writer:
        writer.add_shard(shard_name(0), write_conversations(rows), rows=len(rows))
        writer.finish({"rows": len(rows)})
    output = str(folder / "features")
    settings = {"target": path, "conversations": source, "output": output, "dtype": "float32", "last": "all"}
    extraction.run(ExtractFeaturesConfig(**settings), QUIET)
    return output


def convert(
    source: Path | str, output: Path | str, target: str | None, **settings: object
) -> stage.ConvertResult:
    fields = {"source": str(source), "output": str(output), "target": target, "device": "cpu"}
    return stage.run(ConvertConfig(**(fields | settings)), QUIET)  # type: ignore[arg-type]


def refusal(source: Path | str, output: Path | str, target: str | None, **settings: object) -> str:
    with pytest.raises(EagleError) as error:
        convert(source, output, target, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def rows_of(output: Path | str) -> dict[int, FeatureRow]:
    shards = list(read_feature_shards(open_artifact(str(output), "features")))
    return {row.row_id: row for shard in shards for row in shard.rows()}


def manifest_of(output: Path | str) -> Manifest:
    return open_artifact(str(output), "features").manifest


def pickles_with_our_layers(folder: Path, target: Target, chats: list[Chat]) -> Path:
    low, mid, high = (layer - 1 for layer in target.feature_layers)
    return write_speculators_pickles(folder, target, chats, layers=(low, mid, high))


def packed(folder: Path, target: Target, chats: list[Chat]) -> Path:
    return write_specforge(folder, target, chats, packed=True, padding=5)


WRITERS: dict[str, Callable[[Path, Target, list[Chat]], Path]] = {
    "speculators": write_speculators,
    "speculators up to 0.4": pickles_with_our_layers,
    "SpecForge": write_specforge,
    "SpecForge, packed and padded": packed,
}


@pytest.mark.parametrize("tool", WRITERS)
def test_states_of_another_tool_become_what_extraction_makes_of_the_rows(
    tool: str, target: Target, path: str, chats: list[Chat], extracted: str, tmp_path: Path
) -> None:
    source = WRITERS[tool](tmp_path / "theirs", target, chats)
    result = convert(source, tmp_path / "f", path, shard_bytes=20_000, max_reject_rate=0.2, last="all")
    ours, theirs = rows_of(extracted), rows_of(tmp_path / "f")
    assert theirs.keys() == ours.keys()
    assert len(ours) == len(chats)
    for number, row in ours.items():
        for name in ("input_ids", "loss_mask", "target_argmax", "supervised"):
            assert torch.equal(getattr(theirs[number], name), getattr(row, name)), (number, name)
        torch.testing.assert_close(theirs[number].aux, row.aux, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(theirs[number].every_last, row.every_last, rtol=1e-5, atol=1e-5)
    made, wanted = manifest_of(tmp_path / "f"), manifest_of(extracted)
    assert made.target is not None
    assert made.target.mismatch(wanted.target) == []
    assert (
        made.files == wanted.files
    )  # the target's config, tokenizer, embeddings, norm, lm_head: byte for byte
    assert made.config["feature_layers"] == wanted.config["feature_layers"]
    for count in ("rows", "tokens", "supervised_tokens", "skipped_rows", "clipped_rows"):
        assert made.counts[count] == wanted.counts[count]
    assert made.counts["unmasked_tokens"] == sum(sum(c.text_mask) - sum(c.loss_mask) for c in chats) > 0
    assert len(made.shards) > 2
    assert result.bytes == sum(entry.bytes for entry in (*made.shards, *made.files))


def test_the_first_versions_of_speculators_took_the_outputs_of_the_layers(
    target: Target, path: str, chats: list[Chat], tmp_path: Path
) -> None:
    source = write_speculators_pickles(tmp_path / "theirs", target, chats[:2])
    convert(source, tmp_path / "f", path)
    assert manifest_of(tmp_path / "f").config["feature_layers"] == [3, 5, 6]
    with torch.no_grad():
        shown = target.model(torch.tensor([chats[0].input_ids]), output_hidden_states=True)
    row = rows_of(tmp_path / "f")[0]
    expected = torch.cat([shown.hidden_states[layer][0] for layer in (3, 5, 6)], dim=-1)
    torch.testing.assert_close(row.aux, expected[: len(row.aux)], rtol=1e-5, atol=1e-5)


def test_the_masks_are_found_beside_the_states_and_where_the_user_says(
    target: Target, path: str, chats: list[Chat], tmp_path: Path
) -> None:
    whole = write_speculators(tmp_path / "theirs", target, chats[:4])
    convert(whole / "hidden_states", tmp_path / "beside", path)
    shutil.copytree(whole / "hidden_states", tmp_path / "alone")
    message = refusal(tmp_path / "alone", tmp_path / "x", path)
    assert "hidden states and no loss masks" in message
    assert "--dataset" in message
    convert(tmp_path / "alone", tmp_path / "given", path, dataset=str(whole))
    assert [s.sha256 for s in manifest_of(tmp_path / "beside").shards] == [
        s.sha256 for s in manifest_of(tmp_path / "given").shards
    ]
    assert "no prepared dataset" in refusal(
        tmp_path / "alone", tmp_path / "x", path, dataset=str(tmp_path / "alone")
    )


def test_what_the_source_stores_decides_the_number_format(
    target: Target, path: str, chats: list[Chat], tmp_path: Path
) -> None:
    half = load_target(path, device="cpu", dtype="bfloat16")
    source = write_specforge(tmp_path / "theirs", half, chats[:3])
    convert(source, tmp_path / "f", path)
    convert(source, tmp_path / "wide", path, dtype="float32")
    for name, dtype in (("f", torch.bfloat16), ("wide", torch.float32)):
        made = manifest_of(tmp_path / name)
        assert made.target is not None
        assert made.target.dtype == str(dtype).removeprefix("torch.")
        assert {row.aux.dtype for row in rows_of(tmp_path / name).values()} == {dtype}
        assert {row.last.dtype for row in rows_of(tmp_path / name).values()} == {dtype}


def test_a_remote_source_gives_the_same(target: Target, path: str, chats: list[Chat], tmp_path: Path) -> None:
    source = write_speculators(tmp_path / "theirs", target, chats)
    fsspec.filesystem("memory").put(f"{source}/", "/convert/theirs/", recursive=True)
    convert(source, tmp_path / "f", path)
    convert("memory://convert/theirs", "memory://convert/f", path)
    local, remote = manifest_of(tmp_path / "f"), manifest_of("memory://convert/f")
    assert [shard.sha256 for shard in remote.shards] == [shard.sha256 for shard in local.shards]
    assert remote.config == local.config


def test_states_are_stored_in_the_format_asked_for(
    target: Target, path: str, chats: list[Chat], extracted: str, tmp_path: Path
) -> None:
    source = write_speculators(tmp_path / "theirs", target, chats)
    convert(source, tmp_path / "f", path, storage_dtype="fp8")
    (shard,) = read_feature_shards(open_artifact(str(tmp_path / "f"), "features"))
    assert shard.aux.dtype == torch.float8_e4m3fn
    for number, row in rows_of(extracted).items():
        made = next(each for each in shard.rows() if each.row_id == number)
        assert torch.equal(made.target_argmax, row.target_argmax)  # of the states before they were rounded
        assert float((made.aux.float() - row.aux).norm() / row.aux.norm()) < 0.05
        assert float((made.last.float() - row.last).norm() / row.last.norm()) < 0.05


def test_layers_that_the_source_was_told_to_take_are_recorded(
    target: Target, path: str, chats: list[Chat], tmp_path: Path
) -> None:
    source = write_specforge(tmp_path / "theirs", target, chats[:2])
    convert(source, tmp_path / "f", path, layers="1,4,7")
    assert manifest_of(tmp_path / "f").config["feature_layers"] == [1, 4, 7]
    assert "8 is not between 1 and 7" in refusal(source, tmp_path / "g", path, layers="1,4,8")


def test_rows_are_cut_at_the_given_length(
    target: Target, path: str, chats: list[Chat], tmp_path: Path
) -> None:
    source = write_specforge(tmp_path / "theirs", target, chats[:2])
    convert(source, tmp_path / "f", path, max_length=8)
    rows = rows_of(tmp_path / "f")
    assert max(len(row.input_ids) for row in rows.values()) <= 8
    assert manifest_of(tmp_path / "f").counts["clipped_rows"] == 2
    source = write_specforge(tmp_path / "long", target, chats[:6])
    convert(source, tmp_path / "g", path, max_length=12, long_rows="drop")
    counts = manifest_of(tmp_path / "g").counts
    assert counts["dropped_rows"] == sum(len(each.input_ids) > 12 for each in chats[:6])
    assert counts["rows"] + counts["dropped_rows"] == 6  # type: ignore[operator]
    assert counts["skipped_rows"] == 0


def partly_bad(folder: Path, target: Target, chats: list[Chat]) -> Path:
    """13 files: three good, six that cannot be used for a reason each, four good, of which one has NaN where
    nothing is learned."""
    short, mute = Chat([1, 2], [0, 1], [0, 1]), Chat([1, 2, 3, 4], [0] * 4, [0] * 4)
    source = write_speculators(folder, target, [*chats[:3], chats[3], short, mute, *chats[4:10]])
    states = source / "hidden_states"

    def change(number: int, act: Callable[[dict[str, torch.Tensor]], None]) -> None:
        tensors = safetensors.torch.load_file(states / f"hs_{number}.safetensors")
        act(tensors)
        safetensors.torch.save_file(tensors, states / f"hs_{number}.safetensors")

    data = (states / "hs_3.safetensors").read_bytes()
    (states / "hs_3.safetensors").write_bytes(data[:-100])
    change(6, lambda tensors: tensors["hidden_states"][4, 1].fill_(float("nan")))
    change(7, lambda tensors: tensors["token_ids"][2:3].add_(1))
    change(8, lambda tensors: tensors["hidden_states"][-1, 1].fill_(float("nan")))
    shutil.copy(states / "hs_9.safetensors", states / "hs_99.safetensors")
    return source


def test_files_that_cannot_be_used_are_counted_by_reason_and_too_many_stop_the_run(
    target: Target, path: str, chats: list[Chat], tmp_path: Path
) -> None:
    source = partly_bad(tmp_path / "theirs", target, chats)
    message = refusal(source, tmp_path / "f", path, max_reject_rate=0.3, shard_bytes=4000)
    assert message.startswith("4 of the first 7 of 13 files in ")
    assert "1 damaged (hidden_states/hs_3.safetensors)" in message
    assert "1 too short (hidden_states/hs_4.safetensors)" in message
    assert "more than --max-reject-rate 0.3" in message
    assert list((tmp_path / "f").glob("features-*"))

    convert(source, tmp_path / "f", path, max_reject_rate=0.5, shard_bytes=4000)
    counts = manifest_of(tmp_path / "f").counts
    assert counts["rejected"] == {
        "damaged": 1,
        "too short": 1,
        "without a supervised token": 1,
        "not finite": 1,
        "of other tokens than the dataset": 1,
        "not in the dataset": 1,
    }
    assert counts["skipped_rows"] == 6
    assert sorted(rows_of(tmp_path / "f")) == [0, 1, 2, 8, 9, 10, 11]


def test_a_source_without_one_usable_file_is_an_error(target: Target, path: str, tmp_path: Path) -> None:
    unmasked = Chat([1, 2, 3, 4], [0, 0, 0, 0], [0, 0, 0, 0])
    source = write_specforge(tmp_path / "theirs", target, [unmasked] * 2)
    message = refusal(source, tmp_path / "f", path, max_reject_rate=1)
    assert message.startswith("none of the 2 files")
    assert "2 without a supervised token" in message


KILLED_RUN = """
import json, os, signal, sys
from stages.convert import stage
from stages.convert.config import ConvertConfig
from stages.progress import Reporter, Task

advance = Task.advance
def killing(self, count=1):
    advance(self, count)
    if self.done > self.total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

Task.advance = killing
stage.run(ConvertConfig(**json.loads(sys.argv[1])), Reporter(quiet=True))
"""


def test_a_killed_run_continues_to_what_an_uninterrupted_one_makes(
    target: Target, path: str, chats: list[Chat], tmp_path: Path
) -> None:
    source = write_speculators(tmp_path / "theirs", target, chats)
    fields = {"source": str(source), "output": str(tmp_path / "killed"), "target": path, "shard_bytes": 4000}
    command = [sys.executable, "-c", KILLED_RUN, json.dumps(fields | {"device": "cpu"})]
    # With as many threads as the runs below: another number may add up in another order.
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    killed = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert artifact_state(str(tmp_path / "killed")) == "partial"
    before = {each.name: each.stat().st_mtime_ns for each in (tmp_path / "killed").glob("features-*")}
    assert before

    convert(source, tmp_path / "killed", path, shard_bytes=4000)
    convert(source, tmp_path / "whole", path, shard_bytes=4000)
    assert manifest_of(tmp_path / "killed").digest == manifest_of(tmp_path / "whole").digest
    after = {each.name: each.stat().st_mtime_ns for each in (tmp_path / "killed").glob("features-*")}
    committed = sorted(before.items())[:-1]  # the last one may have been written and not yet recorded
    assert set(committed) < set(after.items())


def test_a_complete_artifact_is_left_alone_and_a_changed_source_refused(
    target: Target, path: str, chats: list[Chat], tmp_path: Path
) -> None:
    source = write_specforge(tmp_path / "theirs", target, chats[:3])
    convert(source, tmp_path / "f", path)
    again = convert(source, tmp_path / "f", path)
    assert "already complete" in again.summary()
    (source / "notes.txt").write_text("not a sample")
    assert "already complete" in convert(source, tmp_path / "f", path).summary()
    content = torch.load(source / "rows_0-4" / "data_2.ckpt")
    content["aux_hidden_state"] += 1
    torch.save(content, source / "rows_0-4" / "data_2.ckpt")
    assert "other content of source" in refusal(source, tmp_path / "f", path)


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("name", ["data_0.pt", "data_0.ckpt"])
def test_a_pickle_of_more_than_tensors_is_refused_and_not_run(name: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / name).write_bytes(saved({"input_ids": Payload(tmp_path / "ran")}))
    message = refusal(tmp_path / "theirs", tmp_path / "f", path, max_reject_rate=1)
    assert f"{name} holds more than tensors (posix.system)" in message
    assert not (tmp_path / "ran").exists()


def test_another_target_is_refused(target: Target, chats: list[Chat], tmp_path: Path) -> None:
    source = write_specforge(tmp_path / "theirs", target, chats[:2])
    wide = make_tiny_target(tmp_path / "wide", vocab=300, hidden=64)
    small = make_tiny_target(tmp_path / "small", vocab=280, hidden=32)
    assert "are 32 wide, and those of --target" in refusal(source, tmp_path / "f", str(wide))
    assert "has token id 299, and --target" in refusal(source, tmp_path / "g", str(small))
    assert "give --target" in refusal(source, tmp_path / "h", None)


def test_where_the_last_states_are_from_is_checked_and_can_be_said(
    target: Target, path: str, chats: list[Chat], tmp_path: Path
) -> None:
    """A norm without its weights gives a root mean square of 1, and nothing else does at every position."""
    normed = write_specforge(tmp_path / "normed", target, chats[:4])
    message = refusal(normed, tmp_path / "f", path, last_state="before-norm")
    assert "from after the final norm already" in message
    plain = write_speculators(tmp_path / "plain", target, chats[:4])
    message = refusal(plain, tmp_path / "f2", path, last_state="after-norm")
    assert "are not what the final norm of" in message
    convert(normed, tmp_path / "g", path, last_state="after-norm")
    convert(plain, tmp_path / "h", path, last_state="before-norm")


def test_a_target_that_the_states_are_not_of_shows_in_its_choices(
    target: Target, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [5, 17, 40]
    for _ in range(40):  # the target's own answer
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1, :299].argmax()))
    mask = [0] * 3 + [1] * 40
    source = write_specforge(tmp_path / "theirs", target, [Chat(ids, mask, mask)])
    other = make_tiny_target(tmp_path / "other", vocab=300, hidden=32, seed=1)
    for name in (path, str(other)):
        config = ConvertConfig(
            source=str(source), output=str(tmp_path / "f"), target=name, device="cpu", overwrite=True
        )
        stage.run(config, Reporter())
        lines = capsys.readouterr().err
        assert "itself would choose" in lines
        assert ("warning: so few agree" in lines) is (name != path)


def test_folders_of_something_else_are_refused_in_one_line(
    target: Target, path: str, chats: list[Chat], extracted: str, tmp_path: Path
) -> None:
    def folder(name: str, *files: str) -> Path:
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes(b"x")
        return tmp_path / name

    output = tmp_path / "output"
    assert "is an eagle artifact already" in refusal(extracted, output, path)
    assert "SpecForge training checkpoint" in refusal(folder("a", "training_state.pt"), output, path)
    assert "holds nothing known (notes.txt)" in refusal(folder("b", "notes.txt"), output, path)
    both = folder("c", "data_0.ckpt", "data_0.pt")
    assert "several kinds (speculators-pickles, specforge)" in refusal(both, output, path)
    assert "nothing of --format head" in refusal(both, output, path, format="head")
    assert "no torch file of tensors alone" in refusal(both, output, path, format="specforge-features")
    assert "has sample 7 twice" in refusal(folder("d", "data_7.ckpt", "data_7.ckpt.gz"), output, path)
    assert "does not exist" in refusal(tmp_path / "absent", output, path)
    dflash = folder("e")
    (dflash / "data_0.ckpt").write_bytes(
        saved({"input_ids": torch.zeros(3), "hidden_states": torch.zeros(3)})
    )
    assert "no file of EAGLE-3 training states" in refusal(dflash, output, path)
    assert not output.exists()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30))
def test_nothing_behind_an_end_of_turn_stays_marked_before_the_next_answer(
    tokens: list[tuple[bool, int]],
) -> None:
    mask, ids = torch.tensor([m for m, _ in tokens], dtype=torch.bool), torch.tensor([i for _, i in tokens])
    expected, ended = [], False
    for marked, token in tokens:
        ended = ended and marked
        expected.append(marked and not ended)
        ended = ended or (marked and token in (2, 3))
    kept, removed = without_glue(mask, ids, torch.tensor([2, 3]))
    assert kept.tolist() == expected
    assert removed == int(mask.sum() - kept.sum())
