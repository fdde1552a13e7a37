"""Three processes that each have a third of a head train it as one process does that has all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROCESSES = 3  # whose parts are uneven: 32 and 50 rows


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], dict[str, Any]]:
    """What `sharded_steps` measures, by kind of head and way of training."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    process = subprocess.run(
        [sys.executable, *torchrun, "-m", "tests.train.sharded_steps"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return {(line["kind"], line["way"]): line for line in lines}


KINDS = ("eagle3", "eagle1", "medusa")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_way = pytest.mark.parametrize(
    ("way", "rel"), [("adamw", 1e-5), ("adamw torch.bfloat16", 1e-2), ("muon", 1e-2)]
)
"""Muon makes matrices orthogonal in bfloat16."""


@every_kind
@every_way
def test_losses_and_held_out_measures_are_those_of_one_process(
    found: dict[tuple[str, str], dict[str, Any]], kind: str, way: str, rel: float
) -> None:
    line = found[kind, way]
    assert len(line["loss"]) == 4
    for step in (*line["loss"], line["overlap"]):
        assert step == pytest.approx([1.0] * 3, rel=rel)
    assert line["asked"][0] == line["asked"][1]


@every_kind
def test_weights_are_those_of_one_process_and_written_as_they_are(
    found: dict[tuple[str, str], dict[str, Any]], kind: str
) -> None:
    line = found[kind, "adamw"]
    assert line["furthest"] < 1e-4  # a step is 3e-3
    assert line["whole_head"] == 0
    assert line["buffers"]


@every_kind
def test_a_process_holds_its_share_of_weights_gradients_and_optimizer_state(
    found: dict[tuple[str, str], dict[str, Any]], kind: str
) -> None:
    shared, alone = found[kind, "adamw torch.bfloat16"]["bytes"]
    assert shared == pytest.approx(alone / PROCESSES, rel=0.05)


def test_a_loss_that_is_not_finite_in_one_process_stops_all_with_the_weights_as_they_were(
    found: dict[tuple[str, str], dict[str, Any]],
) -> None:
    line = found["eagle3", "adamw"]
    assert "at step 5 the loss is nan" in line["refused"]
    assert line["unchanged"]
