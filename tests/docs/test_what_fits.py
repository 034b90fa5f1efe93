"""The rows and configs behind the selector in docs/what_fits.md are valid."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatrain.config import load_config
from megatrain.config.resolved import difference
from megatrain.machine.planned_machine import find_machine

ROOT = Path(__file__).parents[2]
VALUES = json.loads((ROOT / "docs/what_fits.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/what_fits.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def what_fits() -> ModuleType:
    """Import and return docs/what_fits.py."""
    spec = importlib.util.spec_from_file_location("what_fits_page", ROOT / "docs/what_fits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_copied_config(folder: Path, task: str, *, is_split: bool) -> Path:
    """Replace the placeholders of a config in the same way as docs/assets/what_fits.js."""
    drives = "".join(f'[[tiers.nvme]]\npath = "/mnt/drive{number}/state"\n' for number in range(2))
    text = VALUES["configs"][task].replace("MODEL", "Qwen3-8B")
    text = text.replace("SPLIT", "split_experts = true\n" if is_split else "").replace("DRIVES", drives)
    (folder / "copied.toml").write_text(text, encoding="utf-8")
    return folder / "copied.toml"


@pytest.mark.parametrize("task", VALUES["tasks"])
def test_the_config_to_copy_is_accepted(task: str, tmp_path: Path) -> None:
    loaded = load_config(write_copied_config(tmp_path, task, is_split=True))
    assert not loaded.warnings
    assert len(loaded.config.tiers.nvme) == 2 and loaded.config.model.split_experts


@pytest.mark.parametrize("task", VALUES["tasks"])
@pytest.mark.parametrize("is_split", [False, True])
def test_the_config_to_copy_has_the_values_of_the_planned_config(
    what_fits: ModuleType, task: str, is_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only paths and names differ, and ``train_from_scratch``, because plans of all parameters read no weights."""
    monkeypatch.setattr(what_fits, "folder_with_weights", lambda model: tmp_path)
    case = what_fits.Case("Qwen3-8B", "rtx4090-128gb", is_split=is_split, task=task)
    (tmp_path / "planned.toml").write_text(what_fits.config_text(case, 2), encoding="utf-8")
    copied = load_config(write_copied_config(tmp_path, task, is_split=is_split)).config
    diff = difference(load_config(tmp_path / "planned.toml").config, copied)
    changed = {change.key for change in (*diff.altering, *diff.by_contents, *diff.free)}
    changed = {key for key in changed if not key.endswith((".path", ".model_name_or_path"))}
    assert changed - {"output_dir", "run_name"} == ({"model.train_from_scratch"} if task == "all" else set())
    assert VALUES["configs"][task] == what_fits.config_to_copy(task)


def test_rows_are_known_and_fit_or_state_the_missing_memory() -> None:
    rows = VALUES["rows"]
    assert {row["task"] for row in rows} == set(VALUES["tasks"])
    models = {path.name for path in (ROOT / "examples/models").iterdir()}
    assert {row["model"] for row in rows} <= models
    for row in rows:
        assert len(find_machine(row["machine"]).drives) == VALUES["machines"][row["machine"]]["drives"]
        assert ("missing" in row) != ("tokens_per_s" in row), row
        assert "missing" in row or row.get("ram") or row.get("gpu"), row
    keys = [(row["task"], row["model"], row["machine"]) for row in rows]
    assert len(keys) == len(set(keys))


def test_the_page_opens_with_one_table_of_all_machines() -> None:
    opening, _, rest = PAGE.partition("## Your model and machine")
    assert all(machine["title"] in opening for machine in VALUES["machines"].values())
    assert rest.lstrip().startswith('<div id="what-fits">')
