"""All code cells of the notebook run in order, unchanged, in one namespace. The first cell also works on Colab."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples/python/first_steps.ipynb"


def code_cells() -> list[dict[str, Any]]:
    document: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (document["nbformat"], document["metadata"]["kernelspec"]["name"]) == (4, "python3")
    return [cell for cell in document["cells"] if cell["cell_type"] == "code"]


def test_notebook_cells_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = code_cells()
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


def test_the_first_cell_clones_and_installs_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Colab. The test records the two commands, and a symbolic link replaces the clone."""
    calls: list[list[object]] = []

    def record(words: list[object], *, check: bool) -> None:
        assert check
        calls.append(words)
        if words[0] == "git":
            (tmp_path / "megatrain-tier").symlink_to(ROOT)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", record)
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        exec("".join(code_cells()[0]["source"]), names)
    exec("".join(code_cells()[1]["source"]), names)
    clone = tmp_path / "megatrain-tier"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "-c", clone / "constraints.txt", clone]
    assert calls == [["git", "clone", "--depth=1", "REPOSITORY_URL", clone], pip]
    assert names["CONFIG"] == clone / "examples/quickstart/first.toml"


#: Files in the notebook's folder before the test. The notebook must not leave any others.
LISTED = sorted(path.name for path in NOTEBOOK.parent.iterdir() if path.name not in ("outputs", "state"))
