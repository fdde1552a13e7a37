"""Many rows, several processes: the same results in the same order, and an error instead of a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from stages.errors import EagleError
from stages.gen_data.privacy import pool
from stages.gen_data.privacy.config import PrivacyConfig
from stages.gen_data.privacy.pool import AHEAD_ROWS, FEW_ROWS, scan_rows
from stages.gen_data.privacy.rules import Rules, Search


def texts_of(row: str) -> tuple[str, ...]:
    return tuple(row.split("|"))


def rows(count: int):
    for number in range(count):
        yield f"row {number}|mail {number}@example.com" if number % 3 == 0 else f"row {number}|nothing"


def search(**rules) -> Search:
    config = PrivacyConfig()
    return Search("presidio", tuple(config.pii_entities), 0.5, "en", Rules(**rules))


def workers() -> set[int]:
    return {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if "spawn_main" in " ".join(child.cmdline())
    }


def test_few_rows_are_searched_in_this_process(detector):
    given = list(rows(FEW_ROWS - 1))
    results = []
    for row, scans in scan_rows(iter(given), texts_of, search(), detector):
        results.append((row, scans))
        assert len(results) > 1 or not workers()
    assert results == [(row, detector.scan(texts_of(row))) for row in given]


def test_many_rows_give_the_same_in_their_order_and_the_processes_end(detector):
    given = list(rows(FEW_ROWS + 600))
    given[300] = "x" * 20_001 + "|a"
    results = list(scan_rows(iter(given), texts_of, search(processes=2), detector))
    assert results == [(row, detector.scan(texts_of(row))) for row in given]
    assert not workers()


def test_reading_stays_a_bounded_number_of_rows_ahead_on_any_machine(detector, monkeypatch):
    monkeypatch.setattr(pool, "AHEAD_ROWS", 320)
    read = 0

    def counted():
        nonlocal read
        for row in rows(5_000):
            read += 1
            yield row

    results = scan_rows(counted(), texts_of, search(processes=1), detector)
    ahead = []
    for number, _ in enumerate(results, start=1):
        ahead.append(read - number)
        if number == 700:
            results.close()
            break
    assert max(ahead) < 320 + pool.CHUNK_ROWS < AHEAD_ROWS
    assert read < 1_100
    assert not workers()


def test_a_process_that_is_killed_ends_the_search_with_one_line(detector):
    results = scan_rows(rows(100_000), texts_of, search(processes=2), detector)
    for number, _ in enumerate(results):
        if number == 500:
            os.kill(sorted(workers())[0], signal.SIGKILL)
            break
    with pytest.raises(EagleError, match=r"was killed, most likely for want of memory.*processes: 2"):
        for _ in results:
            pass
    assert not workers()


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_search_with_one_line(detector, monkeypatch):
    monkeypatch.setattr(pool, "START_S", 5.0)
    results = scan_rows(rows(100_000), texts_of, search(processes=1, timeout_s=1e-3), detector)
    next(results)
    for pid in workers():
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EagleError, match="does not answer any more"):
        for _ in results:
            pass
    for pid in workers():
        os.kill(pid, signal.SIGKILL)


ORPHANS = """
import os, signal, sys, psutil
sys.modules["torch"] = sys.modules["transformers"] = None
from stages.gen_data.privacy.config import PrivacyConfig
from stages.gen_data.privacy.detector import make_detector
from stages.gen_data.privacy.pool import scan_rows
from stages.gen_data.privacy.rules import Search
if __name__ == "__main__":
    search = Search.of(PrivacyConfig())
    results = scan_rows((f"row {i}" for i in range(10**6)), lambda row: (row,), search, make_detector(search))
    next(results)
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_end_with_a_process_that_is_killed(tmp_path):
    script = tmp_path / "orphans.py"
    script.write_text(textwrap.dedent(ORPHANS))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        check=False,
    )
    pids = list(map(int, done.stdout.split()))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert pids
    end = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
