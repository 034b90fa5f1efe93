"""Limits on CPU time and memory for processing untrusted input: patterns, templates, YAML aliases."""

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

#: Limits on one call. A typical pattern or template needs 1 ms and less than 1 MB.
MAX_CPU_S = 10
MAX_EXTRA_BYTES = 1 << 30  # address space in addition to the caller's usage
_WALL_S = 300.0  # wall-clock limit, for a process that waits instead of computing
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Result = TypeVar("Result")


class LimitError(Exception):
    """Error for a function that reached a limit or failed, or whose process died. The message states the reason."""


def run_limited(function: Callable[[], Result]) -> Result:
    """Call a function in a forked process with limits, and return its result.

    A separate process is needed, because in this process, a regular expression or template could not be interrupted,
    and its memory could not be limited.

    Args:
        function: Function that returns a JSON value. It must not use a device, start threads or change files.

    Raises:
        LimitError: A limit was reached, the function raised an error, or its process ended without a result.
        OSError: The system refused to start a process.
    """
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about threads; the child uses none
        pid = os.fork()
    if pid == 0:
        _run_child(function, write_fd)
    os.close(write_fd)
    answer: bytes | None = None
    try:
        answer = _read_all(read_fd)
    finally:
        os.close(read_fd)
        if answer is None:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if answer is None:
        raise LimitError(f"it does not end within {_WALL_S:g} s")
    if status:
        raise LimitError(_reason(os.waitstatus_to_exitcode(status)))
    is_done, result = json.loads(answer)
    if not is_done:
        raise LimitError(result)
    return result  # type: ignore[no-any-return]


def _reason(code: int) -> str:
    """Return the reason why a child has no result, given its exit status. A negative status is a signal number."""
    if code == -signal.SIGXCPU:
        return f"it takes more than {MAX_CPU_S} s of processor time"
    if code == -signal.SIGKILL:
        return "its process was killed (SIGKILL): the system does so when memory is short"
    if code < 0:
        return f"its process was ended by signal {-code} ({signal.strsignal(-code)})"
    return f"its process ended with exit status {code}"


def _run_child(function: Callable[[], Any], write_fd: int) -> None:
    """Call the function, write its result or its error, and end this process. Never returns."""
    code = 1
    try:
        gc.disable()  # the child must not run destructors of the parent's objects
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
            signal.signal(signal_number, signal.SIG_DFL)
        _limit(resource.RLIMIT_CORE, 0)
        # The kernel sends SIGXCPU at the soft limit, and SIGKILL at the hard limit. SIGKILL can also have other causes.
        _limit(resource.RLIMIT_CPU, MAX_CPU_S, hard=MAX_CPU_S + 1)
        _limit_memory()
        try:
            answer = json.dumps([True, function()]).encode()
        except (MemoryError, OverflowError):
            answer = json.dumps([False, f"it takes more than {MAX_EXTRA_BYTES >> 20} MiB of memory"]).encode()
        except Exception as error:
            answer = json.dumps([False, f"it fails with {type(error).__name__}: {error}"]).encode()
        while answer:
            answer = answer[os.write(write_fd, answer) :]
        code = 0
    finally:
        os._exit(code)


def _limit(resource_id: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit on this process, unless the current limit is stricter."""
    _, current_hard = resource.getrlimit(resource_id)
    hard = soft if hard is None else hard
    hard = hard if current_hard == resource.RLIM_INFINITY else min(hard, current_hard)
    resource.setrlimit(resource_id, (min(soft, hard), hard))


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError):
        _limit(resource.RLIMIT_AS, int(_STATM.read_text().split()[0]) * _PAGE_BYTES + MAX_EXTRA_BYTES)


def _read_all(read_fd: int) -> bytes | None:
    """Return everything that the child writes until it ends, or None if it does not end in time."""
    end_s = time.monotonic() + _WALL_S
    parts: list[bytes] = []
    while (remaining_s := end_s - time.monotonic()) > 0 and select.select([read_fd], [], [], remaining_s)[0]:
        part = os.read(read_fd, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None
