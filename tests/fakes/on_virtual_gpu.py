"""Runs a program and its Python child processes with a software device as "cuda"::

    python tests/fakes/on_virtual_gpu.py bench/gpu.py --quick --device cuda --parts 7b_4k
    python tests/fakes/on_virtual_gpu.py -m cli run run.toml
    VIRTUAL_GPU_BYTES=50000000 python tests/fakes/on_virtual_gpu.py -m cli plan run.toml
    VIRTUAL_GPU_INTEGRATED=1 python tests/fakes/on_virtual_gpu.py -m cli run run.toml

Takes the same arguments as the Python interpreter: a file, ``-m MODULE`` or ``-c CODE``, followed by the program's
arguments. Times are meaningless, so measurements by ``doctor`` are stored separately from the real machine's rates.
"""

from __future__ import annotations

import functools
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("XDG_CACHE_HOME", str(Path(tempfile.gettempdir(), f"virtual_gpu_cache_{os.getuid()}")))

from fakes.gpu_run import virtual_gpu  # noqa: E402

TOTAL_BYTES = "VIRTUAL_GPU_BYTES"
INTEGRATED = "VIRTUAL_GPU_INTEGRATED"
DEFAULT_TOTAL_BYTES = 1 << 30
_WITH_NO_VALUE = ("-P", "-u", "-B", "-s", "-S", "-E", "-I")


def main(words: Sequence[str]) -> None:
    """Run a Python command line in this process, with the software device."""
    total_bytes = int(os.environ.get(TOTAL_BYTES, DEFAULT_TOTAL_BYTES))
    kind, rest = (words[0], words[1:]) if words[0] in ("-m", "-c") else ("", words)
    name, sys.argv = rest[0], [kind or rest[0], *rest[1:]]
    started = functools.partialmethod(_start, subprocess.Popen.__init__)
    with (
        mock.patch.object(subprocess.Popen, "__init__", started),
        virtual_gpu(total_bytes, is_integrated=INTEGRATED in os.environ),
    ):
        if kind == "-c":
            exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
        elif kind == "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(name).resolve().parent))
            runpy.run_path(name, run_name="__main__")


def _start(process: Any, start: Callable[..., None], command: Any, *args: Any, **options: Any) -> None:
    """Start a process like ``subprocess.Popen``, but run Python programs with this file, so they use the device."""
    start(process, _run_through_this_file(command), *args, **options)


def _run_through_this_file(command: Any) -> Any:
    if isinstance(command, str | bytes) or command[0] != sys.executable:
        return command
    words = list(command[1:])
    while words and words[0] in _WITH_NO_VALUE:
        del words[0]
    return [sys.executable, __file__, *words]


if __name__ == "__main__":
    main(sys.argv[1:])
