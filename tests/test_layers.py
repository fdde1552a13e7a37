"""Imports point one way, no stage knows another, and configurations import nothing heavy."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_cli.catalog import STAGES, Stage

ROOT = Path(__file__).parents[1]
PACKAGES = ("eagle_cli", "stages", "kernels")
STAGE_PACKAGES = tuple(stage.package for stage in STAGES)
LAYERS = (
    ("eagle_cli",),
    STAGE_PACKAGES,
    ("stages.decoding",),
    ("stages.heads",),
    ("stages.features",),
    ("stages.vllm",),
    ("stages.targets",),
    ("stages.prompts",),
    ("stages.artifacts", "kernels"),
    ("stages.config", "stages.progress"),
    ("stages.errors",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
HEAVY = {
    "torch",
    "transformers",
    "vllm",
    "datasets",
    "numpy",
    "fsspec",
    "presidio_analyzer",
    "fastapi",
    "pyarrow",
    "rich",
}


def part_of(module: str) -> str | None:
    """The part a module belongs to: `stages.heads` for `stages.heads.eagle3`; None outside this project."""
    names = module.split(".")
    if names[0] not in PACKAGES or names == ["stages"]:
        return None
    return names[0] if names[0] != "stages" else ".".join(names[:2])


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, at its top or within a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=[str(path.relative_to(ROOT)) for path in MODULES])
def test_imports_point_down(path: Path) -> None:
    here = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    if here is None:
        return
    assert here in RANK, f"{here} has no place among the layers"
    for module in imported_modules(path):
        there = part_of(module)
        if there is not None and there != here and module != "stages.__version__":
            assert RANK[there] > RANK[here], f"{here} imports {module}"


@pytest.mark.parametrize("stage", STAGES, ids=[stage.name for stage in STAGES])
def test_each_stage_has_the_same_shape(stage: Stage) -> None:
    assert list(inspect.signature(stage.run()).parameters) == ["config", "report"]


def test_configurations_import_nothing_heavy() -> None:
    script = (
        "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    )
    configurations = [f"{package}.config" for package in STAGE_PACKAGES]
    done = subprocess.run(
        [sys.executable, "-c", script, *configurations], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert HEAVY.isdisjoint(done.stdout.split())
