from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest

from stages.artifacts import open_artifact
from stages.errors import EagleError
from stages.features.index import RowIndex
from stages.features.layout import FeatureRow
from stages.features.source import OfflineFeatures
from stages.train.batch import TttBatch, collate
from stages.train.data import TrainingPlan, hold_out, plan_training, share_out, split_batches
from stages.train.loader import AHEAD, Loader
from stages.train.reading import HeldOutRows, read_steps
from tests.train.synthetic import make_features, make_row

SHARDS = 4


class Watched(OfflineFeatures):
    """Features that record what is opened, closed and announced."""

    def __init__(self, uri: str) -> None:
        super().__init__(open_artifact(uri, "features"))
        self.is_open: set[int] = set()
        self.opened: list[int] = []
        self.most_open = 0
        self.announced: set[int] = set()

    def prefetch(self, numbers: Sequence[int]) -> None:
        self.announced |= set(numbers)
        super().prefetch(numbers)

    @contextmanager
    def open(self, number: int) -> Iterator[Sequence[FeatureRow]]:
        assert number in self.announced
        with super().open(number) as rows:
            self.opened.append(number)
            self.is_open.add(number)
            self.most_open = max(self.most_open, len(self.is_open))
            yield rows
            self.is_open.remove(number)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    shards = [
        [make_row([0, 0] + [1] * n, seed=n, row_id=n) for n in range(5 * s + 3, 5 * s + 8)]
        for s in range(SHARDS)
    ]
    return make_features(tmp_path_factory.mktemp("reading") / "features", shards)


@pytest.fixture
def features(uri: str) -> Watched:
    return Watched(uri)


def plan_of(
    features: OfflineFeatures, shards_a_window: int = 1, holdout: float = 0.0
) -> tuple[TrainingPlan, list[RowIndex]]:
    rows = [row for shard in features.shards for row in shard.rows]
    train, held = hold_out(rows, holdout, seed=0)
    plan = plan_training(train, [1] * SHARDS, batch_tokens=20, epochs=2, seed=0, window_bytes=shards_a_window)
    return plan, held


def ids(steps: Generator[list[list[FeatureRow]], None, None]) -> list[list[int]]:
    return [[row.row_id for micro in step for row in micro] for step in steps]


@pytest.mark.parametrize("shards_a_window", [1, 2, SHARDS])
def test_rows_come_in_the_order_of_the_plan_and_one_window_is_open(features: Watched, shards_a_window: int):
    plan, _ = plan_of(features, shards_a_window)
    planned = [[row.row_id for row in batch] for window in plan.windows for batch in window.batches]
    assert ids(read_steps(features, plan.windows, HeldOutRows([]))) == planned
    assert features.most_open == shards_a_window
    assert not features.is_open


def test_what_is_left_of_a_plan_opens_what_it_needs(features: Watched):
    plan, _ = plan_of(features)
    whole = ids(read_steps(features, plan.windows, HeldOutRows([])))
    for done in (0, 3, plan.epoch_ends[0], plan.steps - 1, plan.steps):
        features.opened.clear()
        assert ids(read_steps(features, plan.after(done), HeldOutRows([]))) == whole[done:]
        assert len(features.opened) == len(plan.after(done))


def test_processes_and_micro_batches_take_the_rows_of_each_step_between_them(features: Watched):
    plan, _ = plan_of(features)
    whole = ids(read_steps(features, plan.windows, HeldOutRows([])))
    shares = [
        ids(read_steps(features, plan.windows, HeldOutRows([]), lambda batch, r=r: share_out(batch, 3, 8)[r]))
        for r in range(3)
    ]
    assert [sorted(chain.from_iterable(rows)) for rows in zip(*shares, strict=True)] == [
        sorted(rows) for rows in whole
    ]


def test_a_shard_that_the_next_window_has_too_stays_open(features: Watched):
    plan, _ = plan_of(features, shards_a_window=SHARDS)
    ids(read_steps(features, plan.windows, HeldOutRows([])))
    assert sorted(features.opened) == [*range(SHARDS)]


def test_the_next_windows_shards_are_announced_while_one_is_read(features: Watched):
    plan, _ = plan_of(features)
    batches = read_steps(features, plan.windows, HeldOutRows([]))
    next(batches)
    assert features.announced == {*plan.windows[0].shards, *plan.windows[1].shards}
    batches.close()
    assert not features.is_open


def test_rows_held_out_are_kept_as_they_pass_by(features: Watched):
    plan, held = plan_of(features, holdout=0.4)
    rows = HeldOutRows(split_batches(held, 1000))
    ids(read_steps(features, plan.windows, rows))
    passed = {*features.opened}
    (batch,) = rows.batches(features)
    assert [row.row_id for row in batch] == [index.row_id for index in held]
    for index, row in zip(held, batch, strict=True):
        with features.open(index.shard) as shard:
            assert row.aux.equal(shard[index.row].aux)
            assert row.aux.data_ptr() != shard[index.row].aux.data_ptr()
    assert {*features.opened} == passed | {index.shard for index in held}
    features.opened.clear()
    list(rows.batches(features))
    assert not features.opened


def test_rows_held_out_that_did_not_pass_by_are_read_one_shard_at_a_time(features: Watched):
    _, held = plan_of(features, holdout=0.4)
    rows = HeldOutRows(split_batches(held, 10))
    assert [row.row_id for batch in rows.batches(features) for row in batch] == [i.row_id for i in held]
    assert features.most_open == 1
    assert rows.waited > 0


def make_batch(rows: Sequence[FeatureRow]) -> TttBatch:
    return collate(rows, steps=2)


def test_the_loader_gives_the_batches_that_its_thread_has_made(features: Watched):
    plan, _ = plan_of(features)
    made_in: set[str] = set()

    def prepare(rows: Sequence[FeatureRow]) -> TttBatch:
        made_in.add(threading.current_thread().name)
        return make_batch(rows)

    with Loader(read_steps(features, plan.windows, HeldOutRows([])), prepare) as loader:
        batches = [batch for (batch,) in loader]
    expected = [make_batch(rows) for (rows,) in read_steps(features, plan.windows, HeldOutRows([]))]
    assert len(batches) == len(expected) == plan.steps
    for batch, other in zip(batches, expected, strict=True):
        assert batch.aux.equal(other.aux)
        assert batch.tokens.equal(other.tokens)
    assert made_in == {"eagle-loader"}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_memory_maps_one_window_at_a_time(features: Watched, uri: str):
    plan, _ = plan_of(features)
    mapped = []
    with Loader(read_steps(features, plan.windows, HeldOutRows([])), make_batch) as loader:
        for _ in loader:
            maps = Path("/proc/self/maps").read_text().splitlines()
            mapped.append(len({line.split()[-1] for line in maps if f"{uri}/features-" in line}))
    assert max(mapped) == 1
    assert f"{uri}/features-" not in Path("/proc/self/maps").read_text()


def test_the_loader_is_a_few_batches_ahead_and_stops_when_left(features: Watched):
    plan, _ = plan_of(features)
    made = 0

    def prepare(rows: Sequence[FeatureRow]) -> TttBatch:
        nonlocal made
        made += 1
        return make_batch(rows)

    with Loader(read_steps(features, plan.windows, HeldOutRows([])), prepare) as loader:
        next(iter(loader))
        time.sleep(0.3)
        assert made <= 1 + AHEAD + 1 < plan.steps
    assert not features.is_open
    assert "eagle-loader" not in {thread.name for thread in threading.enumerate()}


def test_an_error_of_reading_comes_in_the_place_of_its_batch(features: Watched):
    plan, _ = plan_of(features)

    def failing() -> Generator[list[list[FeatureRow]], None, None]:
        yield next(read_steps(features, plan.windows, HeldOutRows([])))
        raise EagleError("gone")

    with Loader(failing(), make_batch) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(EagleError, match="gone"):
            next(batches)


def test_a_loader_that_is_told_to_stop_waits_no_longer(features: Watched):
    ended = threading.Event()

    def stuck() -> Generator[list[list[FeatureRow]], None, None]:
        ended.wait()
        yield []

    told = threading.Event()
    with Loader(stuck(), make_batch, interrupt=ended.set, stopped=told.is_set) as loader:
        threading.Timer(0.05, told.set).start()
        assert next(iter(loader), None) is None


def test_waiting_is_the_time_in_which_nothing_was_ready():
    row = make_row([0, 1, 1, 1], seed=0)

    def slow() -> Generator[list[list[FeatureRow]], None, None]:
        for _ in range(3):
            time.sleep(0.1)
            yield [[row]]

    with Loader(slow(), make_batch) as loader:
        for _ in loader:
            pass
    assert 0.28 <= loader.waited < 0.6
    with Loader(slow(), make_batch) as loader:
        time.sleep(0.5)
        for _ in loader:
            time.sleep(0.15)
    assert loader.waited < 0.05
