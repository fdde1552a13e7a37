"""examples/compare.ipynb runs from top to bottom and shows what `eagle bench` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_jsonl

nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient
pytest.importorskip("ipykernel")
ROOT = Path(__file__).parents[2]


def text_of(cell: Any) -> str:
    """All that a cell has put out, as text or HTML."""
    parts = []
    for output in cell.outputs:
        assert output.output_type != "error", output
        data = output.get("data", {})
        parts += [output.get("text", ""), data.get("text/html", ""), data.get("text/plain", "")]
    return "".join(parts)


def test_it_measures_whatever_target_and_head_it_is_given(
    target_folder: Path, head_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(ROOT / "examples/compare.ipynb", as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    prompts = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": "write a line"}, {"prompt": "count one two"}])
    own = {"TARGET": str(target_folder), "HEAD": head_uri, "PROMPTS": [str(prompts)], "OUTPUT": "report"}
    own |= {"MAX_NEW_TOKENS": 8, "CONCURRENCY": "1,2", "DRAFTERS": "ngram,eagle3"}
    parameters.source += "".join(f"\n{name} = {value!r}" for name, value in own.items())
    NotebookClient(notebook, timeout=250, resources={"metadata": {"path": str(tmp_path)}}).execute()
    measured, seen, levels, pairs = [text_of(cell) for cell in notebook.cells if cell.cell_type == "code"][1:]
    assert "answers are the same, token for token" in measured
    assert seen.count("<svg") >= 5
    assert "Output throughput" in seen
    assert "eagle3" in levels
    assert pairs.count("True") >= 2
    assert (tmp_path / "report" / "report.html").is_file()
