"""The example that embeds the store runs and prints the documented text."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from processes import warm

ROOT = Path(__file__).resolve().parent.parent


def test_the_embedding_example_runs() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = warm.run(
        [sys.executable, "-W", "error::RuntimeWarning", "examples/python/embed_store.py"],
        cwd=ROOT,
        env=environment,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "RAM: at most 2.00 MiB of 2.00 MiB"
    assert any(re.fullmatch(r"nvme->ram: \S+ MiB by posix-\w+", line) for line in lines), lines
    assert lines[-2] == "committed generation 1: 3.00 MiB of weights"
    assert lines[-1] == "same output as in memory: True; after reopening: True"
