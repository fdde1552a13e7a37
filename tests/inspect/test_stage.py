"""What `eagle inspect` says of real artifacts, whole and damaged, to people and to scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_cli.main import main
from stages.artifacts import Manifest, open_artifact
from stages.artifacts.conversations import read_conversations
from stages.features.layout import read_feature_shards
from stages.inspect.result import InspectResult
from tests.inspect.conftest import TOPICS

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "numpy", "pyarrow", "fsspec", "gcsfs"}


def inspected(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """The one object that `eagle inspect --json` prints."""
    assert main(["inspect", *arguments, "--json", "--quiet"]) == code
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def page(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["inspect", *arguments, "--quiet"]) == code
    return capfd.readouterr().out


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line of an error without anything shown."""
    assert main(["inspect", *arguments, "--quiet"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("kind", ["conversations", "features", "head", "bench"])
def test_every_kind_is_described_by_its_manifest(
    kind: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = inspected(capfd, f"run/{kind}")
    manifest = Manifest.model_validate_json((run / kind / "manifest.json").read_bytes())
    assert found["state"] == "complete"
    assert found["digest"] == manifest.digest
    assert found["bytes"] == sum(entry.bytes for entry in (*manifest.shards, *manifest.files))
    assert found["rows"] == sum(shard.rows for shard in manifest.shards)
    for field in ("kind", "config", "counts", "target", "shards", "files", "created", "schema_version"):
        assert found[field] == manifest.model_dump(mode="json")[field]


def test_lineage_leads_back_to_the_prompts_after_the_run_has_moved(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = inspected(capfd, "run/bench")
    kinds, states = [], []
    node = found
    while node["parents"]:
        (node,) = node["parents"]
        kinds.append(node["kind"])
        states.append((node["state"], node["found_at"]))
    assert kinds == ["head", "features", "conversations"]
    assert states == [("unchanged", f"run/{kind}") for kind in kinds]
    assert [source["name"] for source in node["sources"]] == ["prompts.jsonl"]
    os.rename("run", "elsewhere")
    assert inspected(capfd, "elsewhere/bench")["parents"][0]["found_at"] == "elsewhere/head"
    shown = page(capfd, "elsewhere/bench")
    assert "unchanged, now at elsewhere/features" in shown
    assert "prompts.jsonl" in shown


def test_conversation_rows_mark_exactly_the_sampled_tokens(
    run: Path, tiny_target: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = list(read_conversations(open_artifact("run/conversations", "conversations")))
    shown = inspected(capfd, "run/conversations", "--rows", "3", "--row-start", "2")["shown"]
    assert [row["row"] for row in shown["rows"]] == [2, 3, 4]  # of two shards
    for row, stored in zip(shown["rows"], rows[2:5], strict=True):
        assert row["id"] == stored.id
        assert row["license"] == "CC0-1.0"
        assert row["input_ids"] == stored.input_ids
        decode = tiny_target.tokenizer.decode
        assert "".join(piece["text"] for piece in row["text"]) == decode(stored.input_ids)
        answers = [
            token for token, sampled in zip(stored.input_ids, stored.loss_mask, strict=True) if sampled
        ]
        assert "".join(piece["text"] for piece in row["text"] if piece["supervised"]) == decode(answers)
        assert row["supervised_tokens"] == len(answers)


def test_a_conversation_is_found_by_its_id(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (row,) = inspected(capfd, "run/conversations", "--row", "prompts.jsonl:5")["shown"]["rows"]
    assert row["id"] == "prompts.jsonl:5"
    assert f"Tell me about {TOPICS[4]}." in [message["content"] for message in row["messages"]]


def test_rows_are_marked_in_plain_text_and_coloured_on_a_terminal(run: Path) -> None:
    command = [sys.executable, "-m", "eagle_cli", "inspect", "run/conversations", "--rows", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "TERM": "xterm"}

    def run_with(**settings: str) -> str:
        return subprocess.run(
            command, env=environment | settings, capture_output=True, text=True, check=True
        ).stdout

    plain, coloured = run_with(), run_with(FORCE_COLOR="1")
    uncoloured = run_with(FORCE_COLOR="1", NO_COLOR="1")
    for text in (plain, uncoloured):
        assert "<|im_start|>assistant\n\u27e6" in text
        assert "\x1b[32m" not in text
    assert "<|im_start|>assistant\n\x1b[32m" in coloured
    assert "\u27e6" not in coloured


def test_without_the_tokenizer_messages_and_ids_are_shown(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = run / "conversations" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["target"]["name"] = str(tmp_path / "gone")
    manifest.write_text(json.dumps(content))
    found = inspected(capfd, "run/conversations", "--rows", "1")["shown"]
    assert found["rows"][0]["text"] is None
    assert "gone" in found["note"]
    text = page(capfd, "run/conversations", "--rows", "1")
    for message in found["rows"][0]["messages"]:
        assert f"{message['role']}: {message['content']}".partition("\n")[0] in text
    assert "\u27e6" + str(found["rows"][0]["input_ids"][found["rows"][0]["loss_mask"].index(1)]) in text


def test_another_tokenizer_than_that_which_made_the_ids_gives_no_text(
    run: Path, tmp_path: Path, tiny_path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (other / name).write_bytes((Path(tiny_path) / name).read_bytes())
    tokenizer = json.loads((Path(tiny_path) / "tokenizer.json").read_text())
    tokenizer["decoder"] = None
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = ["run/conversations", "--rows", "1"]
    error = refused(capfd, *rows, "--target", str(other))
    assert f"--target {other} has another tokenizer than {tiny_path}, for which run/conversations" in error
    manifest = run / "conversations" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["target"]["name"] = str(other)
    manifest.write_text(json.dumps(content))
    shown = inspected(capfd, *rows)["shown"]
    assert shown["rows"][0]["text"] is None
    assert "has another tokenizer" in shown["note"]
    assert "no config.json" in refused(capfd, *rows, "--target", str(run))


def test_feature_rows_have_text_norms_and_agreement(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    artifact = open_artifact("run/features", "features")
    stored = [row for shard in read_feature_shards(artifact) for row in shard.rows()]
    shown = inspected(capfd, "run/features", "--rows", "99")["shown"]["rows"]
    assert [row["id"] for row in shown] == [row.row_id for row in stored]
    assert len(artifact.manifest.shards) > 1
    layers = artifact.manifest.config["feature_layers"]
    for row, expected in zip(shown, stored, strict=True):
        assert [norms["name"] for norms in row["norms"]] == [*(f"layer {layer}" for layer in layers), "last"]
        hidden = expected.last.shape[1]
        middle = expected.aux[:, hidden : 2 * hidden].float().norm(dim=-1)
        assert row["norms"][1]["mean"] == pytest.approx(middle.mean().item())
        assert row["norms"][3]["greatest"] == pytest.approx(expected.last.float().norm(dim=-1).max().item())
        assert row["norms"][3]["states"] == row["supervised_positions"] == len(expected.last)
        assert row["argmax_is_label"] == 1  # answered greedily, in float32
    (same,) = inspected(capfd, "run/features", "--row", str(stored[3].row_id))["shown"]["rows"]
    assert same == shown[3]


def test_states_that_are_not_finite_are_counted(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from stages.features.layout import FeatureShard

    path = run / "features" / open_artifact("run/features", "features").manifest.shards[0].path
    shard = FeatureShard.from_bytes(path.read_bytes())
    shard.aux[0, 0] = float("nan")
    rewrite(run / "features", path, shard.to_bytes())
    (row,) = inspected(capfd, "run/features", "--rows", "1")["shown"]["rows"]
    assert [norms["not_finite"] for norms in row["norms"]] == [1, 0, 0, 0]
    assert "1 not finite" in page(capfd, "run/features", "--rows", "1")


def rewrite(folder: Path, path: Path, data: bytes) -> None:
    """Replaces a file, and its entry in the manifest, so that the artifact is whole again."""
    import hashlib

    path.write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in [*manifest["shards"], *manifest["files"]]:
        if entry["path"] == path.name:
            entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_head_shows_its_training_log_evenly_spaced(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = [json.loads(line) for line in (run / "head" / "metrics.jsonl").read_text().splitlines()]
    shown = inspected(capfd, "run/head", "--rows", "2")["shown"]
    assert shown["totals"] == json.loads((run / "head" / "metrics.json").read_text())
    assert shown["rows"] == [log[len(log) // 2 - 1], log[-1]]
    assert inspected(capfd, "run/head", "--rows", "1", "--row-start", "1")["shown"]["rows"] == log[1:2]
    assert "held out" in page(capfd, "run/head", "--rows", "1")


def test_a_report_shows_its_table_and_requests(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = json.loads((run / "bench" / "report.json").read_text())
    shown = inspected(capfd, "run/bench", "--rows", "2", "--row-start", "1")["shown"]
    assert shown["rows"] == report.pop("requests")[1:3]
    assert shown["totals"] == report
    text = page(capfd, "run/bench", "--rows", "1")
    assert f"{report['pooled']['speedup']:.2f}" in text
    assert f"Same text in {report['lossless']['identical']} of {report['lossless']['requests']}" in text


def test_verify_names_every_file_that_differs(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = inspected(capfd, "run/conversations", "--verify")["checked"]
    assert (whole["digests"], whole["faults"]) == (True, [])
    flipped, cut, gone = sorted((run / "conversations").glob("*.parquet"))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    assert inspected(capfd, "run/conversations")["checked"]["faults"] == []  # of the same size
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    found = inspected(capfd, "run/conversations", "--verify", code=1)
    assert [fault["path"] for fault in found["checked"]["faults"]] == [flipped.name, cut.name, gone.name]
    for word in (flipped.name, "changed", cut.name, "truncated", gone.name, "missing", "gen-data"):
        assert word in found["error"]
    out = page(capfd, "run/conversations", "--verify", code=1)
    assert f"{flipped.name} does not match its digest" in out
    assert f"{cut.name} is truncated" in out
    assert f"{gone.name} is missing" in out
    sizes = inspected(capfd, "run/conversations", code=1)["checked"]["faults"]
    assert [fault["path"] for fault in sizes] == [cut.name, gone.name]


def test_artifacts_in_an_object_store(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.put(str(run), "/inspected/run", recursive=True)
    found = inspected(capfd, "memory://inspected/run/head", "--verify")
    features = found["parents"][0]
    assert (features["state"], features["uri"]) == ("unchanged", "run/features")
    os.rename("run", "gone")
    features = inspected(capfd, "memory://inspected/run/head")["parents"][0]
    assert features["found_at"] == "memory://inspected/run/features"
    rows = inspected(capfd, "memory://inspected/run/conversations", "--rows", "2")["shown"]["rows"]
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], ["run is no artifact but holds some", "bench, conversations, features, head"]),
        (["run/head/manifest.json"], ["is a file: give the artifact's folder"]),
        (["nowhere"], ["nowhere does not exist: check the path"]),
        (["memory://nowhere/at/all"], ["memory://nowhere/at/all does not exist: check the path"]),
        (["foreign"], ["foreign is not an artifact, it has no manifest.json"]),
    ],
)
def test_what_is_no_artifact_is_refused_in_one_line(
    arguments: list[str], words: list[str], run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("foreign").mkdir()
    Path("foreign/notes.txt").write_text("x")
    error = refused(capfd, *arguments)
    for word in words:
        assert word in error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace('"schema_version": ', '"schema_version": 9'), "upgrade eagle"),
        (lambda text: text[:-20], "is not JSON"),
        (lambda text: "[]", "holds no JSON object"),
        (lambda text: text.replace('"kind": "conversations"', '"kind": "weights"'), "kind"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused_in_one_line(
    change: Any, words: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    manifest = run / "conversations" / "manifest.json"
    manifest.write_text(change(manifest.read_text()))
    error = refused(capfd, "run/conversations")
    assert words in error
    assert "run/conversations/manifest.json" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run/conversations", "--row", "nobody"], "no row nobody among its 7"),
        (["run/conversations", "--rows", "1", "--row-start", "7"], "--row-start 7 is beyond the 7 rows"),
        (["run/features", "--row", "99"], "no row 99"),
        (["run/head", "--row", "1"], "use --rows"),
        (["run/bench", "--rows", "1", "--row-start", "99"], "beyond the 4 rows"),
    ],
)
def test_rows_that_are_not_there_are_named_and_nothing_else_is_shown(
    arguments: list[str], words: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capfd, *arguments)


def imported(*arguments: str) -> tuple[str, set[str]]:
    """What `eagle inspect` prints in a process of its own, and every module that it imported."""
    script = (
        "import sys; from eagle_cli.main import main; code = main(['inspect', *sys.argv[1:]]);"
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout, set(done.stderr.split())


def test_without_rows_nothing_heavy_is_imported(run: Path) -> None:
    shown, modules = imported("run/bench", "--verify")
    assert "unchanged" in shown
    assert HEAVY.isdisjoint(modules)


def test_text_of_conversations_needs_no_torch(run: Path) -> None:
    shown, modules = imported("run/conversations", "--rows", "1")
    assert "<|im_start|>assistant" in shown
    assert {"torch", "transformers"}.isdisjoint(modules)


def test_a_hostile_artifact_cannot_steer_the_terminal(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    manifest = run / "conversations" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["config"]["note"] = "\x1b[2Jred\x9b31m \u202egnp.exe"
    content["counts"]["\x1b]0;title\x07"] = 1
    manifest.write_text(json.dumps(content))
    out = page(capfd, "run/conversations")
    assert "\\x1b[2Jred\\x9b31m \\u202egnp.exe" in out
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out)


def test_every_field_of_the_json_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    for name in InspectResult.model_fields:
        assert f"`{name}`" in text, f"docs/cli.md does not explain {name}"
