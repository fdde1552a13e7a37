"""What a run has found: checks, times, and how they are shown."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import CUDA

Row = dict[str, Any]


@dataclass
class Report:
    """Everything here goes to the JSON file.

    seconds: what each part of the run took.
    faults: tracebacks, by check.
    """

    machine: Row = field(default_factory=dict)
    checks: list[Row] = field(default_factory=list)
    attention: list[Row] = field(default_factory=list)
    kernels: list[Row] = field(default_factory=list)
    cycle: Row = field(default_factory=dict)
    loops: list[Row] = field(default_factory=list)
    engine: Row = field(default_factory=dict)
    tilings: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Report:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """A fault in here is a failed check, and what comes behind still runs."""
        try:
            yield
            if CUDA:
                torch.cuda.synchronize()  # what the GPU has met belongs to this
        except Exception as error:
            self.faults[name] = traceback.format_exc()
            first = (str(error).strip() or "no message").splitlines()[0][:200]
            self.check(name, False, f"{type(error).__name__}: {first}")

    def check(self, name: str, passed: bool, found: str) -> None:
        self.checks.append({"name": name, "passed": bool(passed), "found": found})
        print(f"  {'ok  ' if passed else 'FAIL'}  {name}: {found}", flush=True)

    @property
    def failed(self) -> list[str]:
        return [check["name"] for check in self.checks if not check["passed"]]

    def print_tables(self) -> None:
        print("\nAttention, microseconds a layer\n" + table(self.attention))
        print("\nOther kernels\n" + table(self.kernels))
        print("\nCycle of all kernels: " + json.dumps(self.cycle))
        if self.tilings:
            ordered = sorted(self.tilings, key=lambda row: (row["nodes"], row["us"]))
            print("\nTilings of attention\n" + table(ordered))
        if self.loops:
            print("\nThe engine's cycle with a head, filters on where it is launched\n" + table(self.loops))
        if "runs" in self.engine:
            print("\nEngine\n" + table(self.engine["runs"]))
        else:
            print(f"\nEngine: {self.engine.get('left_out', 'it failed')}")


def table(rows: Sequence[Row]) -> str:
    """Aligned columns, those of the first row."""
    columns = list(rows[0]) if rows else []
    lines = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(t.rjust(w) for t, w in zip(line, widths, strict=True)) for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def machine() -> Row:
    """The device, and versions."""
    import triton  # whose package has other names on ROCm

    name = torch.cuda.get_device_name() if CUDA else "CPU, in Triton's interpreter: times mean nothing"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__}
