"""C library settings that return freed tensor memory to the system, or keep it for later tensors.

If pages are returned, the system must map and zero new pages for the next tensor. This makes a step on the CPU 20 %
longer (decision 0085). Kept pages are unused memory between live tensors, and no plan counts this memory. A run that
computes on the CPU therefore keeps pages within an op. Between ops, it returns them if the process would exceed the
plan during the next op. By default, glibc keeps all pages of tensors of up to 32 MiB.

The settings affect the whole process. With C libraries other than glibc, this module does nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tiered.units import MiB

#: Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Minimum size of tensors that are mapped separately, so that freeing them returns their memory. The first value is
#: used to return memory. The second value is used to keep memory, and is the maximum that glibc accepts.
_RETURN_THRESHOLD, _KEEP_THRESHOLD = 4 * MiB, 32 * MiB
#: Threshold above which glibc returns free memory at the end of the heap. This is the maximum that mallopt accepts.
_MAX_THRESHOLD = 2**31 - 1
#: Freed memory that a process keeps even above its plan, because each return takes milliseconds.
_SPARE_BYTES = 16 * MiB
#: Linux file with the page counts of this process. The second number is the count of resident pages.
_STATM = "/proc/self/statm"

#: Limits by store, one per open run. A limit bounds the sum of resident bytes before an op and the op's bytes.
_limits: dict[object, int] = {}


def return_freed_memory() -> None:
    """Return large CPU tensors of this process to the system as soon as they are freed."""
    _set_thresholds(_RETURN_THRESHOLD, 2 * _RETURN_THRESHOLD)


@contextmanager
def keep_freed_memory(store: object, limit_bytes: int) -> Iterator[None]:
    """Within the context, keep freed memory for later tensors unless the process exceeds the limit.

    After the last such context exits, the memory of large tensors is returned as soon as they are freed.

    Args:
        store: Store of the run. The run's ops check the limit.
        limit_bytes: Maximum resident bytes of the process, including the bytes of the current op.
    """
    if os.path.exists(_STATM) and _set_thresholds(_KEEP_THRESHOLD, _MAX_THRESHOLD):
        _limits[store] = limit_bytes
    else:
        return_freed_memory()
    try:
        yield
    finally:
        _limits.pop(store, None)
        if not _limits:
            return_freed_memory()
        trim()


def return_excess_memory(store: object, op_bytes: int) -> None:
    """Return all freed memory to the system if an op would exceed the limit. The check takes a few microseconds."""
    limit = _limits.get(store)
    if limit is not None and _resident_bytes() + op_bytes > limit:
        trim()
        # Other code holds the remaining excess. Raise the limit, because otherwise every later op would trim again.
        _limits[store] = max(limit, _resident_bytes() + op_bytes + _SPARE_BYTES)


def trim() -> None:
    """Return all completely free pages to the system."""
    malloc_trim = _find_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _resident_bytes() -> int:
    with open(_STATM, "rb", buffering=0) as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def _set_thresholds(mmap_threshold: int, trim_threshold: int) -> bool:
    """Set both thresholds. Return whether the C library accepted them."""
    mallopt = _find_function("mallopt")
    return mallopt is not None and bool(
        mallopt(_M_MMAP_THRESHOLD, mmap_threshold) and mallopt(_M_TRIM_THRESHOLD, trim_threshold)
    )


def _find_function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
