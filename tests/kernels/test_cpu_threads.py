"""The layers' own barrier: whatever becomes of threads and cores, no forward hangs or gives other numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from kernels.cpu import load_ops

pytestmark = pytest.mark.skipif(load_ops() is not None, reason=f"no CPU ops: {load_ops()}")

HANGS_S = 120


def start(*names: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.many_threads", *names],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """What it printed last."""
    try:
        output, errors = process.communicate(timeout=HANGS_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output.splitlines()[-1]


def test_more_threads_than_cores_several_teams_errors_and_forks_change_no_number() -> None:
    finish(start("counts", "engines", "forks"))


def test_processes_on_the_same_cores_that_are_stopped_amid_forwards_go_on_with_the_same_numbers() -> None:
    processes = [start("steady"), start("steady")]
    stopped = processes[0]
    assert stopped.stdout is not None
    for pause in range(8):
        assert stopped.stdout.readline() == "forward\n"
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(0.005 * pause)
        stopped.send_signal(signal.SIGCONT)
    first, second = map(finish, processes)
    assert first == second
