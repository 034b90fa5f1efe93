"""Large tensors that are freed leave the process, whatever is still there between them."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import psutil, torch
from megatrain.engine.environment import give_back_freed_memory
if sys.argv[1] == "given":
    give_back_freed_memory()
torch.ones(7 << 20)  # of 28 MiB: from now on glibc takes smaller ones from its heap
before = psutil.Process().memory_info().rss
tensors, small = [], []  # that stay between them
for _ in range(16):
    tensors.append(torch.ones(2 << 20))
    small.append(torch.ones(20_000))
tensors.clear()
print((psutil.Process().memory_info().rss - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_freed_tensors_leave_the_process() -> None:
    root = Path(__file__).parents[3]
    left = {}
    for what in ("given", "kept"):
        words = [sys.executable, "-c", PROGRAM, what]
        environment = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        left[what] = int(done.stdout)
    assert left["given"] < 8 < 64 < left["kept"], left
