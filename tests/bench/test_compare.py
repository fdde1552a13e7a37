"""Claims about comparing two reports, and about the gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eagle_cli.main import main
from stages.artifacts import ArtifactWriter
from stages.bench.compare import compare, run
from stages.errors import EagleError
from tests.bench.test_page import report


def saved(folder: Path, made: Any) -> str:
    with ArtifactWriter.open(str(folder), "report", {}) as writer:
        writer.add_file("report.json", made.to_json())
        writer.finish({})
    return str(folder)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """The second was made with another cap, and is twice as fast with many requests at once."""
    first, second = report(), report()
    levels = [
        level.model_copy(update={"output_throughput": 2 * level.output_throughput})
        for level in second.sweep.levels
    ]
    second = second.model_copy(
        update={
            "sweep": second.sweep.model_copy(update={"levels": levels}),
            "settings": second.settings | {"max_new_tokens": 99},
        }
    )
    return saved(tmp_path / "a", first), saved(tmp_path / "b", second)


def test_what_changed_is_told_with_what_else_differs(pair: tuple[str, str]) -> None:
    found = run(pair, None)
    changed = {(each.where, each.what): each.percent for each in found.changes if each.before != each.after}
    assert set(changed) == {(f"{who}, {n} at once", "tok/s") for who in ("plain", "EAGLE-3") for n in (1, 2)}
    assert list(changed.values()) == [pytest.approx(100.0)] * 4
    assert found.settings == {"max_new_tokens": (9, 99)}
    assert found.within == ["chat"]
    console = Console(width=110)
    with console.capture() as shown:
        console.print(found.summary())
    assert "+100.0 %" in shown.get()
    assert "Differs: max_new_tokens: 9 -> 99" in shown.get()


def test_only_numbers_of_both_are_compared() -> None:
    found = compare(report(swept=False), report(), "a", "b")
    assert {each.where for each in found.changes} == {"chat"}
    assert found.faults == (0, 0)


def test_the_gate_fails_below_its_bound_and_shows_the_numbers_all_the_same(
    pair: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--compare", *pair, "--fail-below", "1.7"]) == 0
    assert main(["bench", "--compare", *pair, "--fail-below", "1.9"]) == 1
    out, err = capfd.readouterr()
    assert err.splitlines()[-1] == f"error: the speed-up of {pair[1]} is 1.800, below --fail-below 1.9"
    assert out.count("tok/s") > 2


def test_a_report_that_this_version_cannot_read_is_refused(tmp_path: Path, pair: tuple[str, str]) -> None:
    with ArtifactWriter.open(str(tmp_path / "later"), "report", {}) as writer:
        writer.add_file("report.json", b'{"schema_version": 99}\n')
        writer.finish({})
    with pytest.raises(EagleError, match="was written by another version of eagle"):
        run((pair[0], str(tmp_path / "later")), None)


def test_something_else_than_a_report_of_speed_is_refused(tmp_path: Path, pair: tuple[str, str]) -> None:
    with ArtifactWriter.open(str(tmp_path / "parity"), "report", {}) as writer:
        writer.add_file("report.json", b'{"parity": {}}\n')
        writer.finish({})
    with pytest.raises(EagleError, match="has no measured speed"):
        run((pair[0], str(tmp_path / "parity")), None)
