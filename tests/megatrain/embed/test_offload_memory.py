"""Offloading frees the memory of the plain parameters, and loading never holds a whole model in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import memory_of_tiering

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20


@pytest.mark.slow
def test_memory_of_a_process(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "MALLOC_ARENA_MAX": "1"}
    script = str(Path(memory_of_tiering.__file__))
    done = subprocess.run(
        [sys.executable, script, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "memory.json").read_text())
    model, unit = found["model"], memory_of_tiering.UNIT_BYTES
    assert model > 60 * MIB, found
    slack = 10 * MIB  # for the interpreter and torch
    assert found["tier in ram"] < unit + slack, found  # on top of the model, which is already in memory
    assert abs(found["tier in ram, after"]) < slack, found
    assert found["tier in nvme"] < 2 * unit + slack, found
    assert found["tier in nvme, after"] < -model + 3 * unit + slack, found
    assert found["load_pretrained"] < 24 * MIB + slack < model, found
    assert found["steps"] < 24 * MIB + 2 * slack < model, found
    assert found["ram"] <= 24 * MIB
