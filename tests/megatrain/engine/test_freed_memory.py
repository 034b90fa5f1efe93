"""Once a process exceeds its limit, it returns freed tensors to the system, even with live memory between them."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import psutil, torch
from megatrain.engine.device.freed_memory import keep_freed_memory, return_excess_memory, return_freed_memory

store = object()

def resident():
    return psutil.Process().memory_info().rss

def freed():
    tensors, small = [], []  # that stay between them
    for _ in range(16):
        tensors.append(torch.ones(2 << 20))
        small.append(torch.ones(20_000))
    return small

torch.ones(7 << 20)  # of 28 MiB: from now on glibc takes smaller ones from its heap
before = resident()
what, room = sys.argv[1], int(sys.argv[2]) << 20
if what == "given":
    return_freed_memory()
    small = freed()
elif what == "kept":
    with keep_freed_memory(store, before + room):
        small = freed()
        return_excess_memory(store, 0)
        print((resident() - before) >> 20)
        small += freed()
        print((resident() - before) >> 20)
elif what == "before an op":
    with keep_freed_memory(store, before + room):
        small = freed()
        for op_bytes in (0, 32 << 20, 128 << 20):
            return_excess_memory(store, op_bytes)
            print((resident() - before) >> 20)
elif what == "next to another":
    with keep_freed_memory(store, before + room):
        another = torch.ones(64 << 20)  # of 256 MiB, which the forecast lacks
        return_excess_memory(store, 0)
        before = resident()
        torch.ones(2 << 20)
        return_excess_memory(store, 0)
        print((resident() - before) >> 20)
        small = freed()
        return_excess_memory(store, 0)
        print((resident() - before) >> 20)
else:
    small = freed()
print((resident() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_freed_tensors_leave_the_process() -> None:
    """The program frees 128 MiB of tensors, and keeps about 1 MiB between them."""
    assert run("given")[-1] < 8 < 64 < run("by default")[-1]
    little, once_more, after = run("kept", room=64)
    assert little < 8 < 64 < once_more, "more than the limit, as the next op finds"
    assert after < 8
    all_of_it, _, after = run("kept", room=256)
    assert after < 8 < 64 < all_of_it


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_freed_memory_is_kept_if_the_next_op_fits() -> None:
    """With 128 MiB of freed tensors and a limit of 192 MiB, they stay for an op of 32 MiB, but not for 128 MiB."""
    before_none, before_small, before_large, _ = run("before an op", room=192)
    assert before_large < 8 < 64 < before_small == before_none


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc")
def test_some_freed_memory_is_kept_above_the_forecast() -> None:
    """If the process exceeds its forecast, 8 MiB of freed memory is kept, but 128 MiB is returned."""
    little, much, _ = run("next to another", room=64)
    assert much < 4 < little


def run(what: str, room: int = 0) -> list[int]:
    """Run the program in a new process. Return the growth in MiB that it prints at each point."""
    words = [sys.executable, "-c", PROGRAM, what, str(room)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]
