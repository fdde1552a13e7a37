"""Flags, environment variables and help are those of the stages' configurations."""

from __future__ import annotations

import json

import pytest
import typer

from eagle_cli.catalog import STAGES, Stage
from eagle_cli.main import main, stage_command
from stages import __version__
from tests.cli.probe import ProbeStage

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
    assert set(parameters) == {*fields, "json", "quiet", "version"}
    for name, field in fields.items():
        assert parameters[name].opts == [f"--{name.replace('_', '-')}"]
        assert parameters[name].required == field.is_required()
        assert parameters[name].envvar == f"EAGLE_{stage.name}_{name}".replace("-", "_").upper()
        assert field.description, f"--{name} has no help"
    assert main([stage.name, "--help"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    for name, field in fields.items():
        assert f"--{name.replace('_', '-')} " in shown
        if isinstance(field.default, int | float | str) and not isinstance(field.default, bool):
            assert f"default: {field.default}" in shown


@EACH_STAGE
def test_each_stage_prints_the_version(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([stage.name, "--version"]) == 0
    assert capfd.readouterr().out == f"eagle {__version__}\n"


@EACH_STAGE
def test_each_stage_can_be_told_where_and_how_models_run(stage: Stage) -> None:
    assert {"device", "dtype"} <= set(stage.config_class().model_fields)


def test_flags_reach_the_configuration_as_typed(capfd: pytest.CaptureFixture[str]) -> None:
    given = (
        "--act answer --prompts a --prompts b --names c --max-prompts 3 --rate 1 --no-scrub --dtype float32"
    )
    assert chosen(capfd, *given.split()) == {
        "act": "answer",
        "prompts": ["a", "b"],
        "names": ["c"],
        "max_prompts": 3,
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
        ("train --features f --output o --epoch 3", "No such option: --epoch. Did you mean --epochs?"),
        ("trian", "No such command 'trian'. Did you mean 'train'?"),
        ("train --output o", "Missing option '--features'."),
        (
            "train --features f --output o --epochs 0",
            "--epochs 0: Input should be greater than or equal to 1",
        ),
        ("train --features f --output o --epochs x", "Invalid value for '--epochs'"),
        ("train --features f --output o --dtype fp8", "'fp8' is not one of 'auto', 'bfloat16', 'float32'"),
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


def test_a_values_own_check_names_the_flag(capfd: pytest.CaptureFixture[str]) -> None:
    command = stage_command(ProbeStage())
    assert command.main(["--act", "answer", "--rate", "2"], standalone_mode=False) == 2
    assert "error: --rate 2.0: a share lies between 0 and 1 (" in capfd.readouterr().err


def test_a_required_flag_is_required() -> None:
    with pytest.raises(typer.TyperException, match="act"):
        stage_command(ProbeStage()).main([], standalone_mode=False)
