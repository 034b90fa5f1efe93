"""All code cells of the notebook run in order, unchanged, in one namespace."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples/python/first_steps.ipynb"


def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    document: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (document["nbformat"], document["metadata"]["kernelspec"]["name"]) == (4, "python3")
    cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells), "committed without outputs"
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, code cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert names["work"].is_relative_to(tmp_path) and len(cells) >= 7
    assert "RAM: at most" in said and "Call me Ishmael." in said
    assert sorted(path.name for path in NOTEBOOK.parent.iterdir() if path.name not in ("outputs", "state")) == LISTED


#: Files in the notebook's folder before the test. The notebook must not leave any others.
LISTED = sorted(path.name for path in NOTEBOOK.parent.iterdir() if path.name not in ("outputs", "state"))
