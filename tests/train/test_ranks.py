"""Two processes that torchrun starts, connected by gloo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from stages.progress import Reporter
from stages.train.config import TrainConfig
from stages.train.stage import run
from tests.train.synthetic import make_features, make_row
from tests.train.test_loop import assert_same_course

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [make_row([0] * 4 + [1] * (20 + n % 7), seed=n, row_id=n, tokens=40) for n in range(12)]
    return make_features(tmp_path_factory.mktemp("ranks") / "features", [rows[:7], rows[7:]])


SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "batch_tokens": 32,  # one or two rows, so some steps leave a process without any
    "holdout": 0.3,
    "draft_vocab_size": 40,
    "lr": 3e-3,
    "optimizer": "adamw",  # Muon rounds to bfloat16, which shows
}


def start(processes: int, features: str, output: Path, **settings: object) -> subprocess.Popen[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    given = SETTINGS | {"features": features, "output": str(output)} | settings
    flags = [
        text
        for name, value in given.items()
        for text in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    command = [sys.executable, *torchrun, "-m", "eagle_cli", "train", *flags, "--json", "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out)  # one object: only the first process prints
    return result


def test_two_processes_have_the_loss_curve_of_one(features: str, tmp_path: Path):
    two = {
        "whole": start(2, features, tmp_path / "whole", epochs=3, micro_batch_tokens=40),
        "shared": start(2, features, tmp_path / "shared", epochs=3, micro_batch_tokens=20, shard=True),
    }
    given = SETTINGS | {"features": features, "output": str(tmp_path / "one"), "epochs": 3}
    one = run(TrainConfig.model_validate(given), Reporter(quiet=True))
    assert one is not None
    for name, process in two.items():
        assert finished(process)["steps"] == one.steps > 10
        assert_same_course(tmp_path / "one", tmp_path / name)
        assert_same_weights(tmp_path / "one", tmp_path / name)


def assert_same_weights(head: Path, other: Path) -> None:
    """Up to the order of additions."""
    ours, theirs = (safetensors.torch.load_file(each / "model.safetensors") for each in (head, other))
    for name, tensor in ours.items():
        assert (theirs[name].float() - tensor.float()).abs().max() < 1e-2, name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shared", [{}, {"shard": True}], ids=["whole", "shared"])
def test_two_processes_that_were_terminated_continue_bit_for_bit(
    features: str, tmp_path: Path, shared: dict[str, object]
):
    settings = {"epochs": 12, "checkpoint_seconds": 0, "eval_every": 3}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    finished(start(2, features, whole, **settings, **shared))
    process = start(2, features, stopped, **settings, **shared)
    while not (stopped / "checkpoint.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    assert process.returncode != 0
    assert "run the same command again to continue" in err
    refused = start(1, features, stopped, **settings)
    assert "of 2 processes" in refused.communicate(timeout=100)[1]
    refused = start(2, features, stopped, **settings, lr=1e-3)
    err = refused.communicate(timeout=100)[1]
    assert "made with other settings (lr 0.003, now 0.001)" in err
    assert "another process of this training has ended" in err
    assert "a bug" not in err
    otherwise = Path(shutil.copytree(stopped, tmp_path / "otherwise"))

    finished(start(2, features, stopped, **settings, **shared))
    assert (whole / "model.safetensors").read_bytes() == (stopped / "model.safetensors").read_bytes()
    finished(start(2, features, otherwise, **settings, **({} if shared else {"shard": True})))
    assert_same_course(whole, otherwise)
