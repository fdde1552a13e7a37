"""Flags, environment variables and help are those of the stages' configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from eagle_cli.catalog import STAGES, Stage
from eagle_cli.flags import OTHERS, REQUIRED, RUNNING, headings_of
from eagle_cli.main import main, stage_command
from eagle_cli.usage import describe_arguments
from stages import __version__
from stages.config import format_bytes, parse_bytes
from tests.cli.probe import PlacedStage, ProbeStage

EACH_STAGE = pytest.mark.parametrize("stage", STAGES, ids=[stage.name for stage in STAGES])


def chosen(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """The configuration that the probe got from these flags."""
    assert stage_command(ProbeStage()).main([*arguments, "--json"], standalone_mode=False) == 0
    config: dict[str, object] = json.loads(capfd.readouterr().out)["config"]
    return config


@EACH_STAGE
def test_each_field_is_one_flag_with_help_and_default(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    fields = stage.config_class().model_fields
    parameters = {parameter.name: parameter for parameter in stage_command(stage).params}
    assert set(parameters) == {*fields, "config", "json", "quiet", "version"}
    for name, field in fields.items():
        if parameters[name].param_type_name == "option":
            assert parameters[name].opts == [f"--{name.replace('_', '-')}"]
        assert parameters[name].required == field.is_required()
        assert parameters[name].envvar == f"EAGLE_{stage.name}_{name}".replace("-", "_").upper()
        assert field.description, f"--{name} has no help"
    assert main([stage.name, "--help"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    for name, field in fields.items():
        option = parameters[name].param_type_name == "option"
        assert f"--{name.replace('_', '-')} " in shown if option else f" {name.upper()} <" in shown
        if isinstance(field.default, int | float | str) and not isinstance(field.default, bool):
            assert f"default: {parameters[name].default}" in shown


@EACH_STAGE
def test_each_stage_prints_the_version(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([stage.name, "--version"]) == 0
    assert capfd.readouterr().out == f"eagle {__version__}\n"


@EACH_STAGE
def test_help_headings_name_fields_and_cover_all_of_them(stage: Stage) -> None:
    config_class = stage.config_class()
    headings = headings_of(config_class)
    assert headings.keys() == config_class.model_fields.keys()
    assert main([stage.name, "--help"]) == 0


def test_help_shows_what_is_required_first_and_what_all_stages_share_last(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert stage_command(ProbeStage()).main(["--help"], standalone_mode=False) == 0
    out = capfd.readouterr().out
    headings = [line.removesuffix(":") for line in out.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [REQUIRED, OTHERS, "Answers", "Models", RUNNING]
    sections = dict(zip(headings, out.split("\n\n")[-6:-1], strict=True))
    assert "--act" in sections[REQUIRED]
    assert "required" not in sections[REQUIRED].lower().removeprefix("required:")
    assert "--rate" in sections["Answers"]
    for name in ("--overwrite", "--json", "--quiet", "--version", "--help"):
        assert name in sections[RUNNING]


def placed(*arguments: str) -> int:
    code: int = stage_command(PlacedStage()).main(list(arguments), standalone_mode=False)
    return code


def test_a_positional_field_is_given_by_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    assert placed("gs://a/b", "x", "--row-start", "2", "y", "--json") == 0
    config = json.loads(capfd.readouterr().out)["config"]
    assert config == {"uri": "gs://a/b", "others": ["x", "y"], "row_start": 2}


def test_a_positional_field_is_read_from_the_environment_too(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_GEN_DATA_URI", "from/env")
    assert placed("--json") == 0
    assert json.loads(capfd.readouterr().out)["config"]["uri"] == "from/env"


def test_help_shows_positional_fields_as_they_are_typed(capfd: pytest.CaptureFixture[str]) -> None:
    assert placed("--help") == 0
    out = capfd.readouterr().out
    assert out.splitlines()[0].endswith(" [OPTIONS] URI [OTHERS]...")
    assert "\nRequired:\n  URI <str>  What to open.\n" in out
    assert "  OTHERS" in out
    assert "--uri" not in out


def test_a_check_of_a_positional_field_names_it_as_it_is_typed(capfd: pytest.CaptureFixture[str]) -> None:
    assert placed("x" * 20) == 2
    assert f"error: URI {'x' * 20}: must have at most 10 characters" in capfd.readouterr().err


def test_flags_reach_the_configuration_as_typed(capfd: pytest.CaptureFixture[str]) -> None:
    typed = "--act answer --prompts a --prompts b --names c --max-prompts 3 --most 1.5GB --rate 1 --no-scrub"
    assert chosen(capfd, *typed.split(), "--dtype", "float32") == {
        "act": "answer",
        "prompts": ["a", "b"],
        "names": ["c"],
        "max_prompts": 3,
        "room": 3 * 2**20,
        "most": 1_500_000_000,
        "rate": 1.0,
        "scrub": False,
        "device": "auto",
        "dtype": "float32",
        "overwrite": False,
    }


def test_defaults_are_the_configurations_own(capfd: pytest.CaptureFixture[str]) -> None:
    config = chosen(capfd, "--act", "answer")
    assert (config["prompts"], config["names"], config["max_prompts"]) == (["builtin:chat"], [], None)


def test_the_environment_stands_in_for_flags_and_loses_to_them(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_GEN_DATA_ACT", "answer")
    monkeypatch.setenv("EAGLE_GEN_DATA_PROMPTS", "a b")
    monkeypatch.setenv("EAGLE_GEN_DATA_SCRUB", "false")
    monkeypatch.setenv("EAGLE_GEN_DATA_MAX_PROMPTS", "7")
    config = chosen(capfd, "--max-prompts", "9")
    assert (config["prompts"], config["scrub"], config["max_prompts"]) == (["a", "b"], False, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bench --target t --epoch 3", "No such option: --epoch ("),
        ("inspect a --verfy", "No such option: --verfy. Did you mean --verify? ("),
        (
            "--target t bench",
            "No such option: --target before the command, its flags come after it: eagle bench",
        ),
        ("trian", "No such command 'trian'. Did you mean 'train'? (eagle --help lists the commands)"),
        ("bench --target t", "--head, --output are missing (eagle bench --help lists the flags)"),
        ("bench --target t --head h --prompts p", "--output is missing"),
        ("inspect", "URI is missing (eagle inspect --help lists the flags)"),
        ("inspect a --rows", "--rows needs a value (eagle inspect --help lists the flags)"),
        (
            "bench --compare a,b",
            "--compare needs 2 values, parted by a space (eagle bench --help lists the flags)",
        ),
        ("inspect a --rows -1", "--rows -1: must be at least 0"),
        ("inspect a --rows=x", "--rows x: must be a whole number"),
        ("serve --target t --port 99999", "--port 99999: must be at most 65535"),
        ("serve --target t --device tpu", "--device tpu: must be one of auto, cpu, cuda"),
        ("inspect a b", "Unexpected argument: b ("),
        ("bench --endpoint x --prompts p --output o", "--endpoint x: give NAME=URL"),
        (f"inspect a --rows {2**63}", f"--rows {2**63}: is too large: at most {2**63 - 1}"),
        (
            "bench --target t --head h --output o --prompts a b",
            "Unexpected argument: b; each value needs its own --prompts: --prompts b",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert "env var" not in err


def test_what_is_required_is_not_blank(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "head", "--output", " "]) == 2
    assert "--output ' ': must not be empty" in capfd.readouterr().err


def test_a_wrong_value_from_the_environment_is_said_to_be_from_there(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_INSPECT_ROWS", "many")
    assert main(["inspect", "a"]) == 2
    assert "--rows many (from EAGLE_INSPECT_ROWS): must be a whole number" in capfd.readouterr().err


def test_what_the_environment_gives_is_not_missing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_BENCH_OUTPUT", "o")
    assert main(["bench"]) == 2
    assert "--target, --head are missing" in capfd.readouterr().err


def test_h_is_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    assert main(["bench", "-h"]) == 0
    assert "Usage: eagle bench" in capfd.readouterr().out


def test_sizes_are_typed_and_shown_with_units(capfd: pytest.CaptureFixture[str]) -> None:
    for typed in ("256MiB", "256m", "256 mib", "268435456"):
        assert chosen(capfd, "--act", "answer", "--room", typed)["room"] == 256 * 2**20
    command = stage_command(ProbeStage())
    assert command.main(["--act", "answer", "--room", "12x"], standalone_mode=False) == 2
    assert "error: --room 12x: give a number of bytes, such as 268435456, 256MiB" in capfd.readouterr().err
    assert command.main(["--act", "answer", "--room", "0"], standalone_mode=False) == 2
    assert "error: --room 0: must be at least 1" in capfd.readouterr().err
    assert command.main(["--help"], standalone_mode=False) == 0
    assert "--room <bytes>" in (out := capfd.readouterr().out)
    assert "[default: 3MiB]" in out


@given(st.integers(0, 2**60))
def test_a_shown_size_is_read_as_the_same(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count


def test_a_values_own_check_names_the_flag(capfd: pytest.CaptureFixture[str]) -> None:
    command = stage_command(ProbeStage())
    assert command.main(["--act", "answer", "--rate", "2"], standalone_mode=False) == 2
    assert "error: --rate 2.0: a share lies between 0 and 1 (" in capfd.readouterr().err


def test_a_required_flag_is_required() -> None:
    with pytest.raises(typer.TyperException, match="act"):
        stage_command(ProbeStage()).main([], standalone_mode=False)


def run_file(tmp_path: Path, text: str | bytes) -> str:
    file = tmp_path / "run.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(file)


def test_a_run_file_gives_flags_and_the_command_line_and_the_environment_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lists = "prompts: one.jsonl\nnames: [a, b]\n"
    file = run_file(
        tmp_path, f"act: answer\n{lists}max-prompts: 7\nroom: 1MiB\nscrub: no\nrate: 2.5e-1\nmost:\n"
    )
    given = chosen(capfd, "--config", file)
    assert (given["act"], given["prompts"], given["names"]) == ("answer", ["one.jsonl"], ["a", "b"])
    assert (given["max_prompts"], given["room"], given["scrub"], given["rate"]) == (7, 2**20, False, 0.25)
    assert given["most"] is None
    monkeypatch.setenv("EAGLE_GEN_DATA_RATE", "0.75")
    over = chosen(capfd, "--max-prompts", "3", "--names", "c", "--config", file, "--scrub")
    assert (over["max_prompts"], over["names"], over["scrub"], over["rate"]) == (3, ["c"], True, 0.75)
    assert over["room"] == 2**20


def test_the_manifest_of_an_artifact_is_a_run_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = {"act": "answer", "rate": 0.25, "names": ["a"], "prompts_digest": "f" * 64, "most": None}
    manifest = {"kind": "conversations", "schema_version": 1, "config": config}
    given = chosen(capfd, "--config", run_file(tmp_path, json.dumps(manifest)))
    assert (given["rate"], given["names"], given["most"]) == (0.25, ["a"], None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("act: answer\nmaxprompts: 7", "there is no flag maxprompts. Did you mean max-prompts?"),
        ("act: answer\nmax-prompts: 3.5", "--max-prompts 3.5 (from --config): "),
        ("act: nothing", "--act nothing (from --config): must be one of"),
        ("act: answer\nrate: 7", "--rate 7.0: a share lies between 0 and 1"),
        ("act: [answer]", "act takes one value"),
        ("names: [a]", "--act is missing"),
        (
            "{kind: head, schema_version: 1, config: {}}",
            "is of a head artifact, whose settings",
        ),
        ("- act", "has no flags in it"),
        ("", "has no flags in it"),
        ("a: [", "is neither YAML nor JSON"),
        (b"\xff\xfe", "is neither YAML nor JSON"),
    ],
)
def test_what_is_wrong_with_a_run_file_is_one_line(
    text: str | bytes, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", run_file(tmp_path, text)]
    try:
        assert stage_command(ProbeStage()).main(arguments, standalone_mode=False) == 2
        error = capfd.readouterr().err
    except typer.TyperException as raised:
        error = describe_arguments(raised, arguments)
    assert says in error
    assert error.strip().count("\n") == 0
