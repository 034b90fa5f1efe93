"""The rows and configs behind the selector in docs/what_fits.md are valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.machine.planned_machine import find_machine

ROOT = Path(__file__).parents[2]
VALUES = json.loads((ROOT / "docs/what_fits.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/what_fits.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("task", VALUES["tasks"])
def test_the_config_to_copy_is_accepted(task: str, tmp_path: Path) -> None:
    """The test replaces placeholders in the config in the same way as docs/assets/what_fits.js."""
    drives = "".join(f'[[tiers.nvme]]\npath = "/mnt/drive{number}/state"\n' for number in range(2))
    text = VALUES["configs"][task].replace("MODEL", "Qwen3-8B").replace("SPLIT", "split_experts = true\n")
    (tmp_path / "run.toml").write_text(text.replace("DRIVES", drives), encoding="utf-8")
    loaded = load_config(tmp_path / "run.toml")
    assert not loaded.warnings
    assert len(loaded.config.tiers.nvme) == 2 and loaded.config.model.split_experts


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
