from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stages.artifacts import folder as folder_module
from stages.artifacts.folder import ObjectFolder, open_folder
from stages.artifacts.retry import passes, retried
from stages.errors import EagleError
from tests.faults.proxy import answers, cuts_answer, running_proxy, shortens_answer, to
from tests.gcs.server import GcsServer


def test_of_many_who_create_a_file_at_once_exactly_one_makes_it(place: str) -> None:
    folder = open_folder(place)
    for number in range(8):
        name, start = f"deep/{number}.json", threading.Barrier(8)

        def create(who: int, name: str = name, start: threading.Barrier = start) -> bool:
            start.wait()
            return folder.create(name, b"%d" % who)

        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(create, range(8)))
        assert made.count(True) == 1
        assert folder.read(name) == b"%d" % made.index(True)


def test_a_created_file_is_created_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*paths: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", no_links)
    folder = open_folder(str(tmp_path))
    assert folder.create("a.json", b"1")
    assert not folder.create("a.json", b"2")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.json": b"1"}


@pytest.mark.parametrize("size", [30, 300_000, 6 << 20])
def test_data_that_hold_the_boundary_of_an_upload_survive(place: str, size: int, tmp_path: Path) -> None:
    data = (b"x" * 10 + b"\n--==0==--\n" + b"y" * size)[: size + 21]
    (tmp_path / "data").write_bytes(data)
    folder = open_folder(place)
    folder.write("bytes.bin", data)
    folder.write("path.bin", tmp_path / "data")
    assert folder.create("created.bin", data)
    for name in ("bytes.bin", "path.bin", "created.bin"):
        assert folder.read(name) == data


def test_ranges_and_blocks_are_the_files(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "RANGE_BYTES", 7)
    folder, data = open_folder(place), bytes(range(100))
    folder.write("a.bin", data)
    assert folder.read_range("a.bin", 3, 50) == data[3:50]
    assert folder.read_range("a.bin", 90, 200) == data[90:]
    assert folder.read_range("a.bin", 5, 5) == b""
    assert folder.read_range("b.bin", 0, 1) is None
    assert b"".join(folder.blocks("a.bin", 100)) == data
    assert b"".join(folder.blocks("b.bin", 100)) == b""


def test_many_sizes_are_listed_and_what_a_listing_lacks_is_asked_for(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder("gs://bucket/sizes")
    names = [f"{number}.bin" for number in range(80)]
    for name in names[:70]:
        gcs.write("bucket", f"sizes/{name}", name.encode())
    asked = []
    size = ObjectFolder.size
    monkeypatch.setattr(ObjectFolder, "size", lambda self, name: (asked.append(name), size(self, name))[1])
    assert folder.sizes(names) == [len(name) for name in names[:70]] + [None] * 10
    assert sorted(asked) == names[70:]


def test_an_answer_that_is_cut_off_is_asked_for_again(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gcs.write("bucket", "cut/a.bin", b"0123456789")
    with running_proxy(gcs.url) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        folder = open_folder("gs://bucket/cut")
        for deed in (cuts_answer, shortens_answer):
            fault = proxy.fault(deed, to("read", "a.bin"))
            assert b"".join(folder.blocks("a.bin", 10)) == b"0123456789"
            assert fault.done == 1


def test_what_a_busy_store_refuses_is_tried_again_and_then_one_line(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcsfs.retry.asyncio.sleep", _no_sleep)
    monkeypatch.setattr("stages.artifacts.retry._FIRST_PAUSE_S", 0.01)
    with running_proxy(gcs.url) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        folder = open_folder("gs://bucket/busy")
        fault = proxy.fault(answers(503), to("upload"), times=8)  # more than gcsfs tries
        folder.write("a.bin", b"1")
        assert fault.done == 8
        assert gcs.read("bucket", "busy/a.bin") == b"1"
        proxy.fault(answers(429), to("upload"), times=None)
        monkeypatch.setenv("EAGLE_RETRY_S", "0.1")
        with pytest.raises(EagleError, match=r"cannot read or write gs://bucket/busy/a\.bin: .*429"):
            folder.write("a.bin", b"2")


async def _no_sleep(seconds: float) -> None:
    pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError(errno.EBUSY, "Please reduce your request rate."), True),
        (PermissionError(), False),
        (FileExistsError(), False),
        (OSError(28, "No space left on device"), False),
        (ValueError(), False),
    ],
)
def test_what_passes_by_itself(error: Exception, expected: bool) -> None:
    assert passes(error) is expected


def test_a_wrong_answer_is_not_tried_again(tmp_path: Path) -> None:
    calls = []

    def fails() -> None:
        calls.append(1)
        raise PermissionError(13, "Permission denied")

    with pytest.raises(EagleError, match="no permission"):
        retried("gs://bucket/x", fails)
    assert len(calls) == 1
