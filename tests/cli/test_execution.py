"""What a person or a script gets from `eagle`: output, errors, exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_cli.catalog import STAGES
from eagle_cli.main import main, stage_command
from eagle_cli.memory import wanting
from stages import __version__
from stages.errors import EagleError
from tests.cli.probe import ProbeStage

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "datasets", "numpy", "pydantic", "fsspec", "presidio_analyzer", "fastapi"}
RUN_PROBE = (
    "import sys; from eagle_cli.main import stage_command; from tests.cli.probe import ProbeStage;"
    "sys.exit(stage_command(ProbeStage()).main(sys.argv[1:], standalone_mode=False))"
)


def probe(*arguments: str) -> int:
    """Runs the probe stage in this process and returns its exit code."""
    code: int = stage_command(ProbeStage()).main(list(arguments), standalone_mode=False)
    return code


def test_help_lists_the_stages_and_imports_nothing_heavy() -> None:
    script = (
        "import sys; from eagle_cli.main import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for stage in STAGES:
        assert f"  {stage.name} " in done.stdout
    assert HEAVY.isdisjoint(done.stderr.split())
    assert not any(stage.package in done.stderr.split() for stage in STAGES)


def test_version_is_the_packages(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"eagle {__version__}\n"


def test_without_a_stage_the_help_is_shown_as_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "extract-features" in err


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle_cli", "trian"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Did you mean 'train'?" in done.stderr


def test_the_result_goes_to_stdout_and_the_rest_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    assert probe("--act", "chatter") == 0
    out, err = capfd.readouterr()
    assert out == "[done] with chatter\n"
    assert set(err.split("\n")) >= {"probe starts", "python", "native", "child"}


def test_json_is_one_object_whatever_else_writes_to_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert probe("--act", "chatter", "--json") == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["config"]["act"] == "chatter"
    assert out.count("\n") == 1
    assert "child" in err


def test_quiet_shows_the_result_and_no_progress(capfd: pytest.CaptureFixture[str]) -> None:
    assert probe("--act", "answer", "--quiet") == 0
    assert capfd.readouterr() == ("[done] with answer\n", "")


@pytest.mark.parametrize(("quiet", "shown"), [(False, "warning: no compiler\n"), (True, "")])
def test_our_own_warnings_are_one_line_and_no_others_are_shown(quiet: bool, shown: str) -> None:
    script = (
        "import warnings\nfrom eagle_cli import environment\nfrom stages.errors import EagleWarning\n"
        f"environment.prepare(quiet={quiet})\n"
        "warnings.warn('of a library')\nwarnings.warn('no compiler', EagleWarning)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == shown


def test_what_a_user_can_cause_is_one_line_and_exit_code_1(capfd: pytest.CaptureFixture[str]) -> None:
    assert probe("--act", "refuse", "--quiet") == 1
    assert capfd.readouterr() == ("", "error: prompts /nowhere do not exist; give a file\n")


def test_with_json_errors_are_one_object_too(capfd: pytest.CaptureFixture[str]) -> None:
    assert probe("--act", "refuse", "--json") == 1
    assert json.loads(capfd.readouterr().out) == {"error": "prompts /nowhere do not exist; give a file"}
    assert main(["train", "--json"]) == 2
    assert "--output" in json.loads(capfd.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        ("> /dev/full", 1, "error: the output cannot be written to stdout (No space left on device)\n"),
        (">&-", 0, ""),
        (">&- <&-", 0, ""),
        ("> /dev/full 2>&-", 1, ""),
        ("| true", 0, ""),
    ],
)
def test_an_output_that_cannot_be_written_is_no_bug(redirected: str, code: int, said: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m eagle_cli --version {redirected}"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_bug_shows_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    assert probe("--act", "break", "--quiet") == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "probe.py" in err
    assert "ZeroDivisionError: a broken invariant" in err


def test_too_little_memory_is_one_line_that_says_what_to_lower(capfd: pytest.CaptureFixture[str]) -> None:
    assert probe("--act", "fill", "--quiet") == 1
    assert capfd.readouterr() == ("", "error: out of memory: free some, or use a machine with more\n")
    for stage in STAGES:
        for flag in re.findall(r"--[a-z-]+", stage.spare_memory):
            assert flag[2:].replace("-", "_") in stage.config_class().model_fields


def test_whatever_has_too_little_memory_says_so_in_its_own_way() -> None:
    import numpy
    import torch

    def raised(allocate: Callable[[], object]) -> Exception:
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            allocate()
        return caught.value

    assert wanting(raised(lambda: torch.empty(1 << 60, dtype=torch.uint8))) == "out of memory (1.00 EiB more)"
    assert wanting(raised(lambda: numpy.empty(1 << 60, dtype="uint8"))) == "out of memory (1.00 EiB more)"
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
    assert wanting(gpu) == "out of GPU memory (2.00 GiB more)"
    assert wanting(RuntimeError("CUDA error: out of memory\nCUDA kernel errors ...")) == "out of GPU memory"
    loading = EagleError("cannot load target x")
    loading.__cause__ = gpu
    assert wanting(loading) == wanting(gpu)
    assert wanting(RuntimeError("shapes differ")) is None


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_stopped_stage_says_that_a_rerun_continues(number: signal.Signals, code: int, word: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_PROBE, "--act", "wait"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while process.stderr.readline() != "waiting\n":
        assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == ""
    assert err == f"error: {word}; run the same command again to continue\n"


def test_a_missing_input_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    features, head = tmp_path / "features", tmp_path / "head"
    assert main(["train", "--features", str(features), "--output", str(head), "--quiet"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert str(features) in err
    assert not head.exists()


def test_a_missing_target_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target, output = tmp_path / "model", tmp_path / "conversations"
    arguments = ["gen-data", "--target", str(target), "--prompts", "builtin:chat", "--output", str(output)]
    assert main([*arguments, "--max-prompts", "1", "--quiet"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert str(target) in err
