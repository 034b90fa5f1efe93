"""Every bench runs at a tiny size, its rows can be read alone, and what it says about anything but time is ok."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
FIELDS = {"bench", "hardware", "versions", "commit", "T", "name", "value", "unit", "target", "ok", "timing"}

#: Command line of every bench at its smallest.
ARGUMENTS = {"step": ["--quick", "--steps", "2", "--tokens", "2x1x32"]}


@functools.cache
def run(name: str) -> list[dict[str, Any]]:
    """Return the rows of a bench; it runs once, in a folder that it must leave empty."""
    with tempfile.TemporaryDirectory() as folder:
        rows = run_in(name, Path(folder))
        assert list(Path(folder).iterdir()) == []
    return rows


def run_in(name: str, scratch: Path) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCH / f"{name}.py"), "--json", "--scratch", str(scratch), *ARGUMENTS[name]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_bench_is_run_here() -> None:
    programs = {
        path.stem for path in BENCH.glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert programs == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_rows(name: str) -> None:
    rows = run(name)
    assert rows
    assert all(set(row) == FIELDS and row["bench"] == name for row in rows)
    assert all((row["ok"] is None) == (row["target"] is None) for row in rows)
    assert [row for row in rows if row["ok"] is False and not row["timing"]] == []
    assert len({row["name"] for row in rows}) == len(rows)


def test_step_compares_the_three_sides() -> None:
    rows = {row["name"]: row for row in run("step")}
    assert {row["T"] for row in rows.values()} == {64}
    assert all(rows[f"{side}.step"]["value"] > 0 for side in ("ours_ram", "ours_nvme", "plain"))
    assert rows["ratio.ours_ram/plain"]["target"] == 1.10
    assert rows["ours_nvme.nvme->ram.moved_per_step"]["value"] > 0  # the drive takes part
    assert rows["loss.steps_that_differ_by_placement"]["value"] == 0
