"""Searching many rows with all cores: ordered results, bounded memory, and no worker missed when it dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from stages.errors import EagleError
from stages.gen_data.privacy.detector import Detector, Scan, make_detector
from stages.gen_data.privacy.rules import Search

FEW_ROWS = 256
"""So many rows are searched in this process: starting others would take longer."""

CHUNK_ROWS, CHUNK_CHARS = 32, 100_000
AHEAD_ROWS, AHEAD_CHARS = 2_048, 8_000_000
"""Most rows and characters that are read ahead of the row whose result is due. Not a matter of the number of
cores: what a run reads, and so counts, is the same on every machine."""

START_S = 120.0
"""Longest time, in seconds, that a chunk takes beside the time its texts are allowed."""

MOST_PROCESSES = 32

_T = TypeVar("_T")
_Chunk = list[tuple[str, ...]]
_Submit = Callable[[_Chunk], "Future[list[list[Scan]]]"]

_detector: Detector | None = None


def scan_rows(
    rows: Iterable[_T],
    texts_of: Callable[[_T], tuple[str, ...]],
    search: Search,
    detector: Detector,
    wanted: int | None = None,
) -> Iterator[tuple[_T, list[Scan]]]:
    """Each row with what came of its texts, in the order of the rows.

    Args:
        detector: made from `search`; searches where no other process is worth it.
        wanted: how many rows are taken at most, as far as is known; a few are not read ahead of.

    Raises:
        EagleError: a process died or hangs, or the service that searches is out of reach.
    """
    rows = iter(rows)
    if wanted is not None and wanted < FEW_ROWS and search.engine != "dlp":
        yield from ((row, detector.scan(texts_of(row))) for row in rows)
        return
    first = list(islice(rows, FEW_ROWS))
    if len(first) < FEW_ROWS and search.engine != "dlp":
        yield from ((row, detector.scan(texts_of(row))) for row in first)
        return
    with _searching(search, detector) as submit:
        yield from _in_order(submit, _chain(first, rows), texts_of, search)


def processes(search: Search) -> int:
    """How many processes search: one a core that this process may use, up to a limit for memory's sake."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return search.rules.processes or min(cores, MOST_PROCESSES)


def _chain(first: list[_T], rest: Iterator[_T]) -> Iterator[_T]:
    while first:
        yield first.pop(0)
    yield from rest


def _in_order(
    submit: _Submit, rows: Iterator[_T], texts_of: Callable[[_T], tuple[str, ...]], search: Search
) -> Iterator[tuple[_T, list[Scan]]]:
    chunks = _chunks(rows, texts_of)
    under_way: deque[tuple[list[_T], int, Future[list[list[Scan]]]]] = deque()
    ahead_rows = ahead_chars = 0
    ended = False
    while True:
        while not ended and ahead_rows < AHEAD_ROWS and ahead_chars < AHEAD_CHARS:
            chunk = next(chunks, None)
            if chunk is None:
                ended = True
                break
            group, texts, size = chunk
            under_way.append((group, size, submit(texts)))
            ahead_rows += len(group)
            ahead_chars += size
        if not under_way:
            return
        group, size, future = under_way.popleft()
        texts_in_all = sum(len(texts_of(row)) for row in group)
        try:
            scans = future.result(timeout=START_S + texts_in_all * search.rules.timeout_s)
        except FutureTimeoutError:
            raise EagleError(
                "a process that searches for personal data does not answer any more: run the same command "
                "again"
            ) from None
        except BrokenProcessPool:
            raise EagleError(
                "a process that searches for personal data was killed, most likely for want of memory: "
                "run the same command again, with fewer processes in --pii-config (processes: 2) if it "
                "happens again"
            ) from None
        yield from zip(group, scans, strict=True)
        ahead_rows -= len(group)
        ahead_chars -= size


def _chunks(
    rows: Iterator[_T], texts_of: Callable[[_T], tuple[str, ...]]
) -> Iterator[tuple[list[_T], _Chunk, int]]:
    """Rows in groups, their texts, and how many characters those have."""
    group: list[_T] = []
    texts: _Chunk = []
    size = 0
    for row in rows:
        group.append(row)
        texts.append(texts_of(row))
        size += sum(map(len, texts[-1]))
        if len(group) == CHUNK_ROWS or size >= CHUNK_CHARS:
            yield group, texts, size
            group, texts, size = [], [], 0
    if group:
        yield group, texts, size


@contextmanager
def _searching(search: Search, detector: Detector) -> Iterator[_Submit]:
    """Processes that search, or threads that ask a service; none is left when the block is."""
    if search.engine == "dlp":
        threads = ThreadPoolExecutor(search.rules.dlp.requests_at_once)
        try:
            yield lambda chunk: threads.submit(_scan_chunk, chunk, detector)
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
        return
    pool = ProcessPoolExecutor(
        processes(search),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(search,),
    )
    try:
        yield lambda chunk: pool.submit(_scan_chunk, chunk)
    except BaseException:
        for process in list((pool._processes or {}).values()):  # one may hang, and shutdown waits for all
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(search: Search) -> None:
    """Makes a fresh process ready to search."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits for this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = "1"
    if not search.rules.models:
        # presidio and spaCy import them where they are installed: 350 MB and five seconds a process, for
        # nothing.
        for name in ("torch", "transformers", "cupy"):
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    global _detector
    _detector = make_detector(search)


def _end_with_parent() -> None:
    """A process that was killed cannot end its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _scan_chunk(chunk: Sequence[Sequence[str]], detector: Detector | None = None) -> list[list[Scan]]:
    detector = detector or _detector
    assert detector is not None
    scans = iter(detector.scan([text for texts in chunk for text in texts]))
    return [[next(scans) for _ in texts] for texts in chunk]
