"""Forwards under every hardship of threads, run by `test_cpu_threads.py` in processes that may hang."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading

import pytest
import torch

from kernels.cpu import load_ops
from tests.kernels.decoder_layers import Decoder, Layers

SHAPE = Layers(hidden=96, heads=6, kv_heads=2, size=16, inner=160, depth=12, dtype=torch.bfloat16)


class Forwards:
    """One forward again and again: its bits are those that one thread gives."""

    def __init__(self) -> None:
        self.decoder = Decoder(SHAPE, [(1, 9, [-1, 0, 0, 1]), (0, 0, [-1, 0])])
        torch.set_num_threads(1)
        self.expected, _ = self.decoder.by_op()

    def run(self, times: int, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        for _ in range(times):
            assert torch.equal(self.decoder.by_op()[0], self.expected)

    def fail(self) -> None:
        positions, self.decoder.positions = self.decoder.positions, self.decoder.positions + 10**6
        with pytest.raises(RuntimeError, match="no rotation for position"):
            self.decoder.by_op()
        self.decoder.positions = positions


def counts(forwards: Forwards) -> None:
    """Numbers of threads that change from call to call, on all cores and on one, and errors amid."""
    cores = os.sched_getaffinity(0)
    for threads in (2, 8, 1, 4, 3, 8, 2):
        forwards.run(10, threads)
        forwards.fail()
    os.sched_setaffinity(0, {min(cores)})
    for threads in (2, 5):
        forwards.run(10, threads)
    os.sched_setaffinity(0, cores)
    forwards.run(10)


def engines(forwards: Forwards) -> None:
    """Several threads of a process, each with a team of its own."""
    errors: list[BaseException] = []

    def decode(threads: int) -> None:
        try:
            forwards.run(40, threads)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=decode, args=(threads,)) for threads in (2, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors, errors


def forks(forwards: Forwards) -> None:
    """A forked process has none of the threads: it goes on alone, and the one it came from as before."""
    forwards.run(3, 2)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            forwards.run(3)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"
    forwards.run(3)


def steady(forwards: Forwards) -> None:
    """Many forwards; each begins with a line, so that others know."""
    for _ in range(12):
        sys.stdout.write("forward\n")
        sys.stdout.flush()
        forwards.run(20, 4)


if __name__ == "__main__":
    assert load_ops() is None
    forwards = Forwards()
    for name in sys.argv[1:]:
        {"counts": counts, "engines": engines, "forks": forks, "steady": steady}[name](forwards)
    sys.stdout.write(hashlib.sha256(forwards.expected.view(torch.uint8).numpy().tobytes()).hexdigest())
