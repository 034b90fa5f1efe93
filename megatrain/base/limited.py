"""Work on input of strangers, within limits of processor time and memory: patterns, templates, aliases of YAML."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["MAX_CPU_S", "MAX_EXTRA_BYTES", "LimitError", "run_limited"]

#: Limits of one call; a usual pattern or template needs a millisecond and less than a megabyte.
MAX_CPU_S = 10
MAX_EXTRA_BYTES = 1 << 30  # of address space, beyond what the caller's process has
_WALL_S = 300.0  # for a process that waits instead of computing
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Result = TypeVar("Result")


class LimitError(Exception):
    """The work needs more processor time or memory than its limit; the text says which."""


def run_limited(act: Callable[[], Result]) -> Result:
    """Call a function in a forked process with limits, and return its result.

    A regular expression or a template cannot be interrupted in its own process, nor its memory bounded.

    Args:
        act: must not use a device, start threads or change files. Its result is a JSON value.

    Raises:
        LimitError: a limit was reached.
        OSError: the system refused another process.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12, of threads: the child uses none
        pid = os.fork()
    if pid == 0:
        _run_child(act, writing)
    os.close(writing)
    try:
        answer = _read_all(reading)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not answer:
        raise LimitError(f"it takes more than {MAX_CPU_S} s of processor time")
    is_done, result = json.loads(answer)
    if not is_done:
        raise LimitError(f"it takes more than {MAX_EXTRA_BYTES >> 20} MiB of memory")
    return result  # type: ignore[no-any-return]


def _run_child(act: Callable[[], Any], writing: int) -> None:
    """Call the function, write its result and end this process. Never returns."""
    try:
        gc.disable()  # objects of the parent are not destroyed a second time
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        _limit_memory()
        try:
            answer = json.dumps([True, act()]).encode()
        except (MemoryError, OverflowError):
            answer = json.dumps([False, None]).encode()
        while answer:
            answer = answer[os.write(writing, answer) :]
    finally:
        os._exit(0)


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):
        limit = int(_STATM.read_text().split()[0]) * _PAGE_BYTES + MAX_EXTRA_BYTES
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _read_all(reading: int) -> bytes:
    """Return what the child writes until it ends; nothing if it does not end in time."""
    end_s = time.monotonic() + _WALL_S
    parts: list[bytes] = []
    while (left_s := end_s - time.monotonic()) > 0 and select.select([reading], [], [], left_s)[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b""
